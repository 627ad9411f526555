"""A byte-level BPE: learned and stored by `tokenizers`, run by `tiktoken`."""
import json
import re
import sys
from collections.abc import Iterable

import tiktoken
import tokenizers

from maelm import CLS, NUM_SPECIAL, SEP

SPECIALS = ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]  # ids 0 to 3, as in maelm.py
# No merge crosses the boundary of a piece. Letters include marks, such as the vowels of Hindi and combining accents.
PIECES = r" ?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+"


def byte_letters() -> list[str]:
    """The byte-level alphabet of GPT-2 (Radford et al., 2019): a printable letter for each of the 256 bytes."""
    others = [b for b in range(256) if chr(b) == " " or not chr(b).isprintable()]
    return [chr(256 + others.index(b)) if b in others else chr(b) for b in range(256)]


class Tokenizer:
    """A tokenizer whose ids are, in this order, the special tokens, the 256 bytes and the merges."""
    def __init__(self, model: tokenizers.Tokenizer):
        self.model = model
        model.encode_special_tokens = True  # special tokens such as `[MASK]` in a text are read as plain text
        self.uncased = model.normalizer is not None
        byte = {letter: b for b, letter in enumerate(byte_letters())}
        tokens = [model.id_to_token(i) for i in range(model.get_vocab_size())]
        ranks = {}  # the bytes of each token -> its id, which is also its merge rank
        for i in range(NUM_SPECIAL, len(tokens)):
            ranks[bytes(byte[letter] for letter in tokens[i])] = i
        splitter = json.loads(model.to_str())["pre_tokenizer"]["pretokenizers"][0]
        self.tiktoken = tiktoken.Encoding("maelm", pat_str=splitter["pattern"]["Regex"], mergeable_ranks=ranks,
                                          special_tokens={name: i for i, name in enumerate(SPECIALS)})

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, uncased: bool) -> "Tokenizer":
        """Learn merges until there are `vocab_size` ids, including special tokens and bytes, or no pair is left."""
        learner = cls.of_merges([], uncased).model
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - NUM_SPECIAL, initial_alphabet=byte_letters(),
                                                 show_progress=sys.stderr.isatty())
        # For each text, tokenizers needs about a hundred times the text's own memory. A long word takes minutes.
        longest = 1 << 16  # characters
        pieces = (text[start:start + longest] for text in texts for start in range(0, len(text), longest))
        parts = (re.sub(r"\S{1000}", "\\g<0>\n", piece) for piece in pieces)
        learner.train_from_iterator(parts, trainer)
        merges = json.loads(learner.to_str())["model"]["merges"]
        return cls.of_merges(merges, uncased)  # the learner numbers its tokens differently

    @classmethod
    def of_merges(cls, merges: list[list[str]], uncased: bool) -> "Tokenizer":
        """The tokenizer with these merges, in the alphabet of `byte_letters`."""
        tokens = SPECIALS + byte_letters() + [a + b for a, b in merges]
        vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}  # two merges can make the same token
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[*map(tuple, merges)]))
        model.normalizer = tokenizers.normalizers.Lowercase() if uncased else None
        model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        model.decoder = tokenizers.decoders.ByteLevel()
        model.add_special_tokens(SPECIALS)
        return cls(model)

    @classmethod
    def of_json(cls, text: str) -> "Tokenizer":
        """The tokenizer that `to_json` wrote."""
        return cls(tokenizers.Tokenizer.from_str(text))

    def to_json(self) -> str:
        """The content of tokenizer.json, in the format of the library `tokenizers`."""
        return self.model.to_str()

    def framed(self) -> tokenizers.Tokenizer:
        """A copy of the model that adds [CLS] and [SEP] to one or two texts, for fine-tuning and exports."""
        model = Tokenizer.of_json(self.to_json()).model
        frame = tokenizers.processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
        offsets = tokenizers.processors.ByteLevel(add_prefix_space=False)  # without the space before a word
        model.post_processor = tokenizers.processors.Sequence([offsets, frame])
        return model

    def with_masks(self) -> tokenizers.Tokenizer:
        """A framed copy that reads [MASK] in a text as the special token, which absorbs the white space before it."""
        model = self.framed()
        model.encode_special_tokens = False
        model.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True, special=True)])
        return model

    def __len__(self) -> int:
        return self.tiktoken.n_vocab

    def encode(self, text: str):
        """Token ids (length,) uint32. Special tokens such as `[MASK]` are treated as plain text."""
        if self.uncased:  # by `tokenizers`, as in fine-tuning and exports; Python lower-cases some letters differently
            text = self.model.normalizer.normalize_str(text)
        return self.tiktoken.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text. Bytes that are not UTF-8 become U+FFFD; unused ids are left out."""
        return self.tiktoken.decode([int(i) for i in ids if i < len(self)])
