"""A byte-level BPE: learned and stored by `tokenizers`, run by `tiktoken`."""
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import tiktoken
import tokenizers

from maelm import CLS, NUM_SPECIAL, SEP
from support.cli import UserError
from support.files import write_texts
from support.tables import split_long

SPECIALS = ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]  # ids 0 to 3, as in maelm.py
PIECES = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"  # no merge crosses the boundary of a piece
GPT2_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # inside ByteLevel
TEXTS = ["The cat's 12,345 naïve cafés sat;\n\n  don't they?  ", "ΟΔΟΣ 漢字 🙂\tİı ﬁ½ (x_1 != 3.14e-5)", ""]


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
        if None in tokens or tokens[:NUM_SPECIAL] != SPECIALS or not byte.keys() <= set(tokens):
            raise ValueError("its tokens must be special tokens, bytes and merges")  # tiktoken would panic
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
        # For each text, tokenizers needs about a hundred times the text's own memory.
        learner.train_from_iterator(split_long(texts, 1 << 16), trainer)
        merges = json.loads(learner.to_str())["model"]["merges"]
        return cls.of_merges(merges, uncased)  # the learner numbers its tokens differently

    @classmethod
    def of_merges(cls, merges: list[list[str]], uncased: bool, pieces: str = PIECES,
                  letters: list[str] | None = None) -> "Tokenizer":
        """The tokenizer with these merges, in the alphabet of `byte_letters`. Byte ids are ordered like `letters`."""
        tokens = SPECIALS + (letters or byte_letters()) + [a + b for a, b in merges]
        vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}  # two merges can make the same token
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[*map(tuple, merges)]))
        model.normalizer = tokenizers.normalizers.Lowercase() if uncased else None
        model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pieces), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        model.decoder = tokenizers.decoders.ByteLevel()
        model.add_special_tokens(SPECIALS)
        return cls(model)

    @classmethod
    def of_json(cls, name: str, text: str) -> "Tokenizer":
        """A byte-level BPE from the JSON of `tokenizers`. Raises UserError if ours would split text differently."""
        found = json.loads(text)
        vocabulary, splitter = found["model"].get("vocab", {}), found["pre_tokenizer"]
        if "merges" not in found["model"] or not set(byte_letters()) <= set(vocabulary) or not splitter:
            raise UserError(f"{name}: not a byte-level BPE like GPT-2's; WordPiece and SentencePiece do not fit")
        first = splitter.get("pretokenizers", [{}])[0]  # a custom pattern comes before ByteLevel
        pieces = first.get("pattern", {}).get("Regex", GPT2_PIECES)
        uncased = found["normalizer"] == {"type": "Lowercase"}
        ours = cls.of_merges(found["model"]["merges"], uncased, pieces, sorted(byte_letters(), key=vocabulary.get))
        # A tokenizer may do more, such as put a space before a text; then its tokens differ from ours.
        theirs = tokenizers.Tokenizer.from_str(text)
        for example in TEXTS:
            tokens = [ours.model.id_to_token(i) for i in ours.encode(example)]
            if theirs.encode(example, add_special_tokens=False).tokens != tokens:
                raise UserError(f"{name}: reads {example!r} in a way that maelm's tokenizer cannot")
        return ours

    @classmethod
    def read(cls, name: str) -> "Tokenizer":
        """The BPE of a tokenizer.json, alone or in a folder, or of hf:NAME. Raises UserError if there is none."""
        try:
            if name.startswith("hf:"):
                found = tokenizers.Tokenizer.from_pretrained(name.removeprefix("hf:"))
            else:
                path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
                found = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # it raises nothing more specific
            raise UserError(f"--tokenizer {name}: cannot be read as a tokenizer.json ({str(error)[:200]})") from error
        return cls.of_json(name, found.to_str())

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder`/tokenizer.json. Raises UserError if it is damaged or missing."""
        path = folder / "tokenizer.json"
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text("utf-8")))
        except Exception as error:  # it raises nothing more specific
            raise UserError(f"{path}: damaged or missing ({str(error)[:200]}); restore it from a copy") from error

    def save(self, folder: Path):
        """Write `folder`/tokenizer.json atomically."""
        write_texts(folder, {"tokenizer.json": self.model.to_str()})

    def framed(self) -> tokenizers.Tokenizer:
        """A copy of the model that adds [CLS] and [SEP] to one or two texts, for fine-tuning and exports."""
        model = Tokenizer(tokenizers.Tokenizer.from_str(self.model.to_str())).model
        model.post_processor = tokenizers.processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
        return model

    def __len__(self) -> int:
        return self.tiktoken.n_vocab

    def encode(self, text: str):
        """Token ids (length,) uint32. Special tokens such as `[MASK]` are treated as plain text."""
        if self.uncased:  # like `tokenizers`; Python uses another sigma at the end of a word
            text = text.replace("\N{GREEK CAPITAL LETTER SIGMA}", "\N{GREEK SMALL LETTER SIGMA}").lower()
        return self.tiktoken.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text. Bytes that are not UTF-8 become U+FFFD; unused ids are left out."""
        return self.tiktoken.decode([int(i) for i in ids if i < len(self)])
