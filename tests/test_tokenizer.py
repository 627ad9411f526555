"""Claims about support/text/tokenizer.py."""
import sys

import pytest

from maelm import CLS, MASK, NUM_SPECIAL, PAD, SEP
from support.text.tokenizer import SPECIALS, Tokenizer
from tests.common import sentence

ODD = ["The cat sees a tree.", "naïve café — ∑ 数学 🙂\t\r\n  x", "\x00\x7f ~", "a" * 500, "İstanbul ẞ", " ", "",
       bytes(range(256)).decode("latin-1"), "ΑΣ ΣΑΣ. Σ ὈΔΥΣΣΕΎΣ"]


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def tokenizer(request):
    """A tokenizer trained on the little language."""
    return Tokenizer.train(map(sentence, range(100)), 320, request.param)


def test_ids_are_specials_then_bytes_then_merges(tokenizer):
    assert [tokenizer.decode([i]) for i in (CLS, PAD, SEP, MASK)] == SPECIALS == ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]
    pieces = [tokenizer.tiktoken.decode_single_token_bytes(i) for i in range(NUM_SPECIAL, len(tokenizer))]
    assert pieces[:256] == [bytes([b]) for b in range(256)] and len(tokenizer) == 320
    for i, piece in enumerate(pieces[256:], 256):  # each joins two earlier tokens
        assert any({piece[:cut], piece[cut:]} <= set(pieces[:i]) for cut in range(1, len(piece)))


def test_odd_texts_come_back_from_their_tokens(tokenizer):
    for text in (*ODD, "[CLS] [MASK]"):  # special tokens in a text are plain text
        ids = tokenizer.encode(text)
        assert all(NUM_SPECIAL <= i < len(tokenizer) for i in ids)
        letters = map(str.lower, text) if tokenizer.uncased else text
        assert tokenizer.decode([*ids, len(tokenizer)]) == "".join(letters)  # without the unused id


def test_a_long_word_is_learned_in_parts():  # otherwise, it takes minutes
    assert max(map(len, Tokenizer.train(["ab" * 30_000], 400, False).model.get_vocab())) == 1000


def test_a_word_is_one_piece_in_every_script():
    for text in ("हिन्दी में लिखा हुआ वाक्य", "שָׁלוֹם עוֹלָם", "தமிழ் மொழி", "re\u0301sume\u0301 a\u0300 cote\u0301",
                 "สวัสดี ครับ", "مَرْحَبًا بِك"):
        tokenizer = Tokenizer.train(50 * [text], 1000, True)  # whole pieces become tokens
        assert len(tokenizer.encode(text)) == len(text.split()), text


def test_tiktoken_gives_the_ids_of_tokenizers(tokenizer):
    letters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]  # all but surrogates
    texts = ["".join(letters[i:i + 1000]) for i in range(0, len(letters), 1000)]
    cased = [letter for letter in letters if letter.lower() != letter.upper()]
    texts += [*ODD, " ".join(f"a{letter} B" for letter in cased)]  # each also at the end of a word
    expected = tokenizer.model.encode_batch(texts, add_special_tokens=False)
    for text, found in zip(texts, expected):
        assert tokenizer.encode(text).tolist() == found.ids
