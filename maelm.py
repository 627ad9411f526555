"""MAE-LM: the masked autoencoder for language of Meng et al., "Representation Deficiency in Masked Language
Modeling", ICLR 2024.

A masked language model spends model dimensions on [MASK], a token that no downstream text contains, so the
representations of real tokens are rank-deficient (section 2). MAE-LM takes the masked positions out of the
encoder, lets a shallow decoder predict them, and keeps only the encoder (section 3). Figure 2, drawn for
M = {2, 5}:

    x      the   cat   sat   on    the   mat
            |     |           |     |
         [       encoder, L layers       ]       reads real tokens only, at their original positions
            |     |           |     |
           h_0   h_1 [MASK]  h_3   h_4 [MASK]    e_[MASK] fills the gaps, then + p_i
         [       decoder, 4 layers       ]       thrown away after pre-training
                       |                 |
                      sat               mat      predicted at the masked positions only

    symbol           name here                               shape
    x, M             tokens, Corruption.masked               (B, n) int64; (B, n) bool, k are True in each row
    i not in M, x_i  Corruption.kept, .tokens                (B, m) int64, in order: what the encoder reads
    e_x, p_i         token_embedding, position_embedding     (V, d), (n, d)
    H^l, H-hat^0     states; x in MAELM.decode               (B, m, d), (B, n, d)
    (Here m counts the tokens that the encoder reads, n - k; in section 2 it counts the masks, k here.)

    equation                                                 function
    2.1  Attn(Q, K, V) = Softmax(Q K^T / sqrt(d_h)) V        attention; MHSA: Attention.forward
    3    h_i^0 = e_{x_i} + p_i for i not in M                corrupt, Encoder.forward
    3    h-hat_i^0 = e_[MASK] + p_i or h_i^L + p_i           MAELM.decoder_input, Decoder.forward
    (1)  -log p(x_i | x-hat) over i in M                     Head.forward, MAELM.forward

The figure in code (`python -m doctest maelm.py` runs it):

    >>> x = torch.tensor([[10, 11, 12, 13, 10, 14]])  # the cat sat on the mat
    >>> M = torch.tensor([[0, 0, 1, 0, 0, 1]]).bool()
    >>> c = Corruption(masked=M, kept=torch.tensor([[0, 1, 3, 4]]), tokens=torch.tensor([[10, 11, 13, 10]]))
    >>> model = MAELM(Config(vocab_size=300, seq_len=6, encoder_dim=8, encoder_heads=2, mask_rate=1 / 3))
    >>> h = model.encode(c)
    >>> h.shape, model.decoder_input(h, c).shape, model(x, c).shape
    (torch.Size([1, 4, 8]), torch.Size([1, 6, 8]), torch.Size([]))
"""
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLS, PAD, SEP, MASK, NUM_SPECIAL = range(5)  # the first token ids; bytes and merges follow


# ---- 1. Configuration: section 4.1, Tables 2 and 4 ---------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """What is computed. The defaults are the paper's base setting. ValueError names a field that is wrong."""
    vocab_size: int = 32768  # 261 or more: 4 special tokens, 256 bytes and the merges
    seq_len: int = 512  # n, tokens in a row, 2 or more
    encoder_layers: int = 12  # L, 1 or more
    encoder_dim: int = 768  # d
    encoder_heads: int = 12  # N, a divisor of encoder_dim; the decoder's heads have the same size d / N
    dropout: float = 0.1  # in the encoder, below 1; the decoder has none (App. C)
    norm: str = "post"  # post | pre: LayerNorm after or before each sub-layer
    init_std: float = 0.02  # standard deviation of all initial weights
    position_init: str = "normal"  # normal | sinusoid: where learned absolute positions start
    decoder_position_std: float = 1.0  # std of the decoder's sinusoids; they are added to states of std 1
    mask_rate: float = 0.15  # share of a row that is predicted, between 0 and 1
    mask_in_encoder: float = 0.0  # delta of Figure 4, 0 to 1: share of masks that the encoder reads
    encoder_fill: str = "mask"  # mask | random: the token that it reads there
    bert_trick: bool = False  # 80 % [MASK], 10 % random, 10 % true tokens there (footnote 1)
    decoder_reset: bool = False  # the decoder reads e_[MASK], not h_i, at every masked position
    aligned_positions: bool = True  # the encoder's positions skip the removed tokens
    rel_pos_buckets: int = 32  # of the encoder's relative positions: an even number, 4 or more; 0 = none
    rel_pos_max_distance: int = 128  # above rel_pos_buckets / 4; all distances from here on share a bucket
    decoder_layers: int = 4  # 0 = none: the encoder predicts, as in standard MLM; needs mask_in_encoder=1
    decoder_dim: int = 0  # a multiple of d / N; 0 = encoder_dim, as without a decoder
    decoder_relative: bool = False  # relative positions as in the encoder, in a "bi" decoder
    decoder_self: str = "bi"  # bi | uni | none: the decoder's self-attention; uni and none need decoder_cross
    decoder_cross: bool = False  # attention to the encoder's output; needs a decoder

    def __post_init__(self):
        if self.decoder_dim == 0:
            object.__setattr__(self, "decoder_dim", self.encoder_dim)  # how a frozen dataclass is assigned to
        decoder = self.decoder_layers > 0
        require_positive(self, "encoder_layers", "encoder_dim", "encoder_heads", "init_std")
        require(
            self,
            vocab_size=self.vocab_size > 260,
            seq_len=self.seq_len > 1,
            encoder_heads=self.encoder_dim % self.encoder_heads == 0,
            dropout=0 <= self.dropout < 1,
            norm=self.norm in ("post", "pre"),
            position_init=self.position_init in ("normal", "sinusoid"),
            mask_rate=0 < self.mask_rate < 1,
            mask_in_encoder=0 <= self.mask_in_encoder <= 1,
            encoder_fill=self.encoder_fill in ("mask", "random"),
            bert_trick=not self.bert_trick or (self.mask_in_encoder > 0 and self.encoder_fill == "mask"),
            rel_pos_buckets=self.rel_pos_buckets % 2 == 0 and self.rel_pos_buckets != 2,
            rel_pos_max_distance=self.rel_pos_max_distance > self.rel_pos_buckets // 4,
            decoder_layers=decoder or self.mask_in_encoder == 1,
            decoder_self=self.decoder_self in (("bi", "uni", "none") if self.decoder_cross else ("bi",)),
            decoder_cross=decoder or not self.decoder_cross,
        )
        if decoder:
            require(self, decoder_dim=self.decoder_dim % (self.encoder_dim // self.encoder_heads) == 0)
        else:
            require(self, decoder_dim=self.decoder_dim == self.encoder_dim)

    def masks_per_row(self, n: int) -> int:
        """k, the number of predicted positions in a row of n tokens: 77 of 512 at 15 % (App. C)."""
        return round(self.mask_rate * n)


def comments_of(config: type) -> dict[str, str]:
    """The comment behind each field of a dataclass, by the field's name."""
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(config), re.MULTILINE))


def require(config, **conditions: bool) -> None:
    """Raise a ValueError for the first field whose condition is False. It quotes the field's comment."""
    for field, holds in conditions.items():
        if not holds:
            comment = comments_of(type(config)).get(field, "")
            raise ValueError(f"{field}={getattr(config, field)!r} is not possible: {comment}")


def require_positive(config, *fields: str) -> None:
    """Raise a ValueError for the first field that is not above 0."""
    for field in fields:
        if not getattr(config, field) > 0:
            raise ValueError(f"{field}={getattr(config, field)!r}: use a positive number")


# A short run finds a gap's neighbours, and decoder positions take no dimensions of H^L: docs/results.md.
SMALL_POSITIONS = dict(position_init="sinusoid", decoder_position_std=0.25, decoder_relative=True)
PRESETS = {  # as differences from the defaults; section 4.1 and Table 4
    "toy": dict(vocab_size=2048, seq_len=64, dropout=0.0, encoder_layers=3, encoder_dim=128, encoder_heads=2,
                decoder_layers=1, norm="pre", init_std=0.06, **SMALL_POSITIONS),
    "small": dict(vocab_size=8192, seq_len=128, encoder_layers=6, encoder_dim=384, encoder_heads=6,
                  decoder_layers=2, norm="pre", init_std=0.03, **SMALL_POSITIONS),
    "base": dict(),
    "base++": dict(vocab_size=64000, rel_pos_buckets=64),
    "large++": dict(vocab_size=64000, encoder_layers=24, encoder_dim=1024, encoder_heads=16,
                    rel_pos_buckets=128, rel_pos_max_distance=256),
}
PRESETS["laptop"] = PRESETS["toy"]  # trained for longer

ABLATIONS = {  # Table 2, row by row, as differences from MAE-LM; Figure 4 is mask_in_encoder = 0, 0.25 ... 1
    "mae-lm": dict(),
    "mlm": dict(mask_in_encoder=1.0, decoder_layers=0),
    "enc-mask": dict(mask_in_encoder=1.0),
    "enc-mask-dec-resets": dict(mask_in_encoder=1.0, decoder_reset=True),
    "random-replace": dict(mask_in_encoder=1.0, encoder_fill="random"),
    "misaligned": dict(aligned_positions=False),
    "no-relative": dict(rel_pos_buckets=0),
    "bi+cross": dict(decoder_cross=True),
    "uni+cross": dict(decoder_self="uni", decoder_cross=True),
    "cross": dict(decoder_self="none", decoder_cross=True),
    "dec-2": dict(decoder_layers=2),
    "dec-6": dict(decoder_layers=6),
    "dec-512": dict(decoder_dim=512),
    "dec-1024": dict(decoder_dim=1024),
}


# ---- 2. Removing the masked positions: section 3, App. C ---------------------------------------------------
class Corruption(NamedTuple):
    """A masked batch. Removed positions are in neither `kept` nor `tokens`: the encoder cannot see them."""
    masked: Tensor  # (B, n) bool, the set M
    kept: Tensor  # (B, m) int64, original positions that the encoder reads, ascending
    tokens: Tensor  # (B, m) int64, what it reads there


def corrupt(tokens: Tensor, config: Config, generator: torch.Generator,
            maskable: Tensor | None = None) -> Corruption:
    """In each row choose M: exactly k = config.masks_per_row(n) positions, all choices equally likely, among
    its real tokens (id >= NUM_SPECIAL) or, if `maskable` is given, where that is True; section 3.

    tokens (B, n) int64 and maskable (B, n) bool are on the generator's device. Of M, a random
    round(mask_in_encoder * k) stay in the encoder's input, where it reads `fill`. The rest is removed, so
    every row keeps m positions. Pure: all random numbers come from `generator`, and tokens do not change.
    The tokens at M do not change the result, except with bert_trick. Raises ValueError if k is 0 or a row has
    fewer than k positions to choose from."""
    B, n = tokens.shape
    k = config.masks_per_row(n)
    if maskable is None:
        maskable = tokens >= NUM_SPECIAL
    fewest = int(maskable.sum(1).min())
    if not 0 < k <= fewest:
        raise ValueError(f"mask_rate={config.mask_rate} masks {k} of {n} tokens in a row: use 1 to {fewest}")

    # One random number for each position: those with the k smallest are M. Others get a number above all.
    order = torch.rand(B, n, generator=generator, device=tokens.device)
    order = order.masked_fill(~maskable, 2.0)
    chosen = order.topk(k, largest=False).indices  # (B, k)
    nowhere = torch.zeros_like(maskable)
    masked = nowhere.scatter(1, chosen, True)

    # `chosen` is sorted by these random numbers, not by position: its first entries are a random part of M.
    shown = round(config.mask_in_encoder * k)  # 0 in MAE-LM
    removed = nowhere.scatter(1, chosen[:, shown:], True)

    # All rows keep equally many. nonzero() lists them row by row, ascending: one list to cut into B rows.
    kept = (~removed).nonzero()[:, 1].view(B, -1)  # (B, m)

    read = torch.where(masked, fill(tokens, config, generator), tokens)
    return Corruption(masked, kept, read.gather(1, kept))


def fill(tokens: Tensor, config: Config, generator: torch.Generator) -> Tensor:
    """What the encoder reads at masked positions that stay: [MASK], a random token, or BERT's mixture of both
    and the true one. tokens (B, n) int64 -> (B, n) int64."""
    mask = torch.full_like(tokens, MASK)
    if config.encoder_fill == "mask" and not config.bert_trick:
        return mask
    device = tokens.device
    real = torch.randint(NUM_SPECIAL, config.vocab_size, tokens.shape, generator=generator, device=device)
    if config.encoder_fill == "random":
        return real
    u = torch.rand(tokens.shape, generator=generator, device=device)
    return torch.where(u < 0.1, real, torch.where(u < 0.2, tokens, mask))  # 10 %, 10 %, 80 %: footnote 1


# ---- 3. Relative positions: section 4.1 (Raffel et al., 2019), App. C --------------------------------------
def relative_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """T5's bidirectional buckets of distance = key position - query position: int64 of any shape -> int64.

    The upper half of the buckets, from half = num_buckets // 2, is for keys to the right (distance > 0). In
    both halves the first `exact` = half // 2 buckets hold one |distance| each: 0, 1, ... The r others hold
    ranges, the last of them without end. The smallest |distance| in range i = 0 ... r - 1 is
    exact * (max_distance / exact) ** (i / r), rounded up; rounding errors must not move a whole number."""
    # Differs from the paper: its code has another formula, with one bucket unused; the text cites T5.
    half = num_buckets // 2
    exact = half // 2  # distances below this have a bucket of their own
    size = distance.abs()

    # From `exact` (share 0) to max_distance (share 1): equal steps on a logarithmic scale. float64 and
    # + 1e-9: where the exact value is an integer, rounding must not push it just below.
    share = (size.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact)
    far = exact + ((half - exact) * share + 1e-9).long()
    far = far.clamp(max=half - 1)

    bucket = torch.where(size < exact, size, far)
    return torch.where(distance > 0, half + bucket, bucket)


class RelativeBias(nn.Module):
    """One learned number for each bucket and head, added to attention logits; one table for all layers."""
    def __init__(self, config: Config, heads: int):
        super().__init__()
        self.table = nn.Embedding(config.rel_pos_buckets, heads)
        distance = torch.arange(1 - config.seq_len, config.seq_len)  # all there are: (2n - 1,)
        bucket = relative_bucket(distance, config.rel_pos_buckets, config.rel_pos_max_distance)
        self.register_buffer("bucket", bucket, persistent=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Original positions: queries (B, q) and keys (B, k) int64, one B may be 1 -> bias (B, heads, q, k).
        [b, h, i, j] is the table's number for head h and the bucket of distance keys[b, j] - queries[b, i].
        `bucket` lists the buckets of all distances from 1 - seq_len up."""
        # This is table[bucket[keys - queries]] with the heads in front. Written as a gather from one row of
        # numbers for each head: the plain lookup with its transpose costs 10 % of a step of the toy.
        k = keys.shape[1]
        keys = F.pad(keys, (0, -k % 8))  # fused GPU kernels need rows that are a multiple of 8 numbers apart
        values = self.table(self.bucket).t()  # (heads, 2n - 1), by distance
        smallest = -(len(self.bucket) // 2)  # the distance of the first of them
        index = keys[:, None, :] - queries[:, :, None] - smallest  # (B, q, k)
        B, q, padded = index.shape
        heads = len(values)
        flat = index.view(B, 1, q * padded).expand(-1, heads, -1)
        bias = values.expand(B, -1, -1).gather(2, flat).view(B, heads, q, padded)
        if bias.is_cuda and torch.is_autocast_enabled("cuda"):
            # Once for all layers (0.15 GB at base), and before the slice, whose copy would close the gaps.
            bias = bias.to(torch.get_autocast_dtype("cuda"))
        return bias[..., :k]


def causal_bias(queries: Tensor, keys: Tensor) -> Tensor:
    """Positions (B, q) and (B, k) int64 -> (B, 1, q, k): -inf where the key comes after the query, else 0."""
    future = keys[:, None, None, :] > queries[:, None, :, None]
    return torch.zeros(future.shape, device=keys.device).masked_fill(future, -torch.inf)


# ---- 4. Transformer layers: section 2.1 --------------------------------------------------------------------
def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Softmax(Q K^T / sqrt(d_h) + bias) V; section 2.1. q (B, heads, n_q, d_h), k (B, heads, n_k, d_h) and
    v (B, heads, n_k, d_v) -> (B, heads, n_q, d_v). bias: None or broadcastable to (B, heads, n_q, n_k), with
    -inf to hide a key. The weights, Softmax(...), have dropout p; callers set p = 0 outside of training."""
    if q.is_cuda:
        # One fused kernel (support/run.py turns cuDNN's off). On a CPU the plain formula is faster.
        bias = bias.to(q.dtype) if bias is not None else None  # the kernel wants one dtype
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
    d_h = q.shape[-1]
    logits = (q * d_h ** -0.5) @ k.transpose(-2, -1)  # (B, heads, n_q, n_k)
    if bias is not None:
        logits = logits + bias
    weights = logits.float().softmax(dim=-1).to(q.dtype)
    return F.dropout(weights, p) @ v


class Attention(nn.Module):
    """MHSA of section 2.1: head_h = Attn(X W_h^Q, Y W_h^K, Y W_h^V), Concat(head_1 ... head_N) W^O."""
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.p = heads, dropout
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (B, n_q, d), y (B, n_k, d) -> (B, n_q, d). `query` of x gives queries; `key_value` of y gives
        keys (first half of the features) and values. Of each of these, and of what `output` reads, head h has
        the h-th block of d / heads features. bias: as in `attention`. Dropout self.p: in training only."""
        def split(z: Tensor) -> Tensor:
            return z.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, length, d_h)

        # One matrix for all heads, W^Q = [W_1^Q ... W_N^Q], and so on; then the heads are split.
        q = split(self.query(x))
        k, v = self.key_value(y).chunk(2, dim=-1)
        p = self.p if self.training else 0.0
        z = attention(q, split(k), split(v), bias, p)  # (B, heads, n_q, d_h)
        return self.output(z.transpose(1, 2).flatten(2))  # the heads side by side: (B, n_q, d)


class Residual(nn.Module):
    """A sub-layer f with its skip connection: LayerNorm(x + f(x)) for post, x + f(LayerNorm(x)) for pre."""
    def __init__(self, f: nn.Module, dim: int, norm: str, dropout: float):
        super().__init__()
        self.f = f
        self.norm = nn.LayerNorm(dim)
        self.p = dropout
        self.pre = norm == "pre"

    def input(self, x: Tensor) -> Tensor:
        """What f reads of x (B, n, d)."""
        return self.norm(x) if self.pre else x

    def add(self, x: Tensor, fx: Tensor) -> Tensor:
        """The output of the sub-layer, from x (B, n, d) and fx = f(input(x))."""
        x = x + F.dropout(fx, self.p, self.training)
        if self.pre:
            return x
        return self.norm(x).to(fx.dtype)  # autocast's LayerNorm returns float32: twice the bytes to move

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """x (B, n, d), what else f reads -> (B, n, d)."""
        return self.add(x, self.f(self.input(x), *others))


def select(x: Tensor, at: Tensor | None) -> Tensor:
    """x (B, n, d) at positions at (B, k) int64 -> (B, k, d); all of x for None."""
    if at is None:
        return x
    row = torch.arange(len(at), device=at.device)[:, None]
    return x[row, at]


class Block(nn.Module):
    """A Transformer layer: self-attention and cross-attention where present, then the FFN with exact GELU."""
    def __init__(self, config: Config, dim: int, dropout: float, self_attention=True, cross_attention=False):
        super().__init__()
        heads = dim * config.encoder_heads // config.encoder_dim  # of the same size in encoder and decoder
        ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.self_attention = None
        self.cross_attention = None
        if self_attention:
            self.self_attention = Residual(Attention(dim, heads, dropout), dim, config.norm, dropout)
        if cross_attention:
            self.cross_attention = Residual(Attention(dim, heads, dropout), dim, config.norm, dropout)
        self.ffn = Residual(ffn, dim, config.norm, dropout)

    def forward(self, x: Tensor, bias: Tensor | None = None, memory: Tensor | None = None,
                at: Tensor | None = None) -> Tensor:
        """x (B, n, d), memory (B, m, d) -> (B, n, d), or (B, k, d) of only the positions at (B, k) int64."""
        layer = self.self_attention
        if layer is None:
            x = select(x, at)
        else:
            # Keys and values are of all positions, queries only of those that are computed.
            y = layer.input(x)
            x = layer.add(select(x, at), layer.f(select(y, at), y, bias))
        if self.cross_attention is not None:
            x = self.cross_attention(x, memory)
        return self.ffn(x)


class Stack(nn.Module):
    """Layers 1 to L with one rule for the bias of all: a RelativeBias, causal_bias or None."""
    def __init__(self, config: Config, dim: int, layers: int, dropout: float, rule: Callable | None,
                 self_attention=True, cross_attention=False):
        super().__init__()
        self.rule = rule
        self.blocks = nn.ModuleList(Block(config, dim, dropout, self_attention, cross_attention)
                                    for _ in range(layers))
        # Post-LN layers end with a LayerNorm; pre-LN layers do not, so one is added after the last layer.
        self.final_norm = nn.LayerNorm(dim) if config.norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, padding: Tensor | None = None,
                memory: Tensor | None = None, at: Tensor | None = None) -> list[Tensor]:
        """H^0 = x (B, n, d) at positions (B, n) or (1, n) int64, padding (B, n) bool, True = ignore, memory
        (B, m, d) for cross-attention -> H^0 ... H^L. With indices at (B, k) int64 the last layer computes
        only these: H^L is (B, k, d). A step of the toy is then 1.3 times as fast, of base 1.05 times."""
        states = [x]
        bias = self.bias(positions, positions, padding)
        for block in self.blocks[:-1]:
            states.append(block(states[-1], bias, memory))
        if at is not None:
            queries = positions.expand(len(at), -1).gather(1, at)
            bias = self.bias(queries, positions, padding)
        states.append(self.final_norm(self.blocks[-1](states[-1], bias, memory, at)))
        return states

    def bias(self, queries: Tensor, keys: Tensor, padding: Tensor | None) -> Tensor | None:
        """What attention adds to the logits: the rule's bias, and -inf where a key is padding; None for 0."""
        bias = self.rule(queries, keys) if self.rule is not None else None
        if padding is not None:
            hidden = padding[:, None, None, :]  # (B, 1, 1, k)
            bias = torch.zeros_like(hidden, dtype=torch.float32) if bias is None else bias
            bias = bias.masked_fill(hidden, -torch.inf)
            k = bias.shape[-1]
            bias = F.pad(bias, (0, -k % 8))[..., :k]  # masked_fill closed the gaps of RelativeBias
        return bias


# ---- 5. Encoder: H^0 of section 3 to H^L -------------------------------------------------------------------
class Encoder(nn.Module):
    """The model that is kept. It reads real tokens at their original positions; section 3, App. C."""
    def __init__(self, config: Config):
        super().__init__()
        d = config.encoder_dim
        self.token_embedding = nn.Embedding(config.vocab_size, d)
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = nn.LayerNorm(d)
        self.p = config.dropout
        rule = RelativeBias(config, config.encoder_heads) if config.rel_pos_buckets > 0 else None
        self.stack = Stack(config, d, config.encoder_layers, config.dropout, rule)

    def forward(self, tokens: Tensor, positions: Tensor, padding: Tensor | None = None,
                all_layers: bool = False, at: Tensor | None = None) -> Tensor | list[Tensor]:
        """tokens (B, m) int64 at original positions (B, m) or (1, m), padding (B, m) bool, True = ignore
        -> H^L (B, m, d); with all_layers the list H^0 ... H^L of `stack`. H^0 is `norm` of e_x + p_i, then
        dropout self.p in training mode only. With indices `at` (B, k) int64, H^L is only there: (B, k, d)."""
        h = self.token_embedding(tokens) + self.position_embedding(positions)  # h_i^0 = e_{x_i} + p_i
        # Differs from the paper: its formula has no LayerNorm here; its code, like BERT, has.
        h = F.dropout(self.norm(h), self.p, self.training)
        states = self.stack(h, positions, padding, at=at)
        return states if all_layers else states[-1]


# ---- 6. Decoder: section 3, "Decoder Configuration" --------------------------------------------------------
class Decoder(nn.Module):
    """A shallow stack over all n positions, used in pre-training only; no dropout (App. C)."""
    def __init__(self, config: Config):
        super().__init__()
        d = config.decoder_dim
        # A decoder of another width reads its input, and H^L, through a projection (Table 2).
        self.project = nn.Linear(config.encoder_dim, d) if config.encoder_dim != d else nn.Identity()
        # Differs from the paper: it writes one p_i; its code, and ours, learn a table of the decoder's own.
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = nn.LayerNorm(d)
        self.cross = config.decoder_cross
        rule = None
        if config.decoder_self == "uni":
            rule = causal_bias
        elif config.decoder_self == "bi" and config.decoder_relative and config.rel_pos_buckets > 0:
            # Differs from the paper: its decoder has no relative positions. The small presets have them.
            rule = RelativeBias(config, d * config.encoder_heads // config.encoder_dim)
        self_attention = config.decoder_self != "none"
        self.stack = Stack(config, d, config.decoder_layers, 0.0, rule, self_attention, self.cross)

    def forward(self, x: Tensor, memory: Tensor, at: Tensor | None = None, padding: Tensor | None = None,
                positions: Tensor | None = None) -> Tensor:
        """H-hat^0 (B, n, d) without p_i, memory H^L (B, m, d), padding (B, n) bool, True = ignore, positions
        (B, n) int64, None for 0 ... n - 1 -> (B, k, decoder_dim) at indices at (B, k) int64, or of all n."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]  # (1, n)
        x = self.project(x) + self.position_embedding(positions)  # h-hat_i^0 = e_[MASK] + p_i or h_i^L + p_i
        memory = self.project(memory) if self.cross else None
        return self.stack(self.norm(x), positions, padding, memory, at)[-1]


# ---- 7. The model and its loss: Eq. (1) --------------------------------------------------------------------
class Head(nn.Module):
    """Logits e_x^T h over the vocabulary, with the encoder's token embeddings E tied; Eq. (1)."""
    def __init__(self, config: Config):
        super().__init__()
        d = config.encoder_dim
        # Differs from the paper: Eq. (1) has e_x^T h_i alone; its code, like BERT, transforms h_i first.
        self.transform = nn.Sequential(nn.Linear(config.decoder_dim, d), nn.GELU(), nn.LayerNorm(d))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, h: Tensor, embeddings: Tensor) -> Tensor:
        """h (B, k, decoder_dim), E (V, d) -> logits (B, k, V)."""
        return F.linear(self.transform(h), embeddings, self.bias)


class MAELM(nn.Module):
    """Encoder, decoder and head: the masked autoencoder, and by its Config every row of Table 2."""
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config) if config.decoder_layers > 0 else None
        self.head = Head(config)
        self.init_parameters()

    def init_parameters(self) -> None:
        """N(0, init_std) for matrices and embeddings, 0 for biases, 1 for gains; see position_init."""
        config = self.config
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # matrices and embeddings
                nn.init.normal_(parameter, std=config.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:  # gains of LayerNorms
                nn.init.ones_(parameter)
        if config.position_init == "sinusoid":
            self.init_positions()

    def init_positions(self) -> None:
        """Start learned positions as sinusoids."""
        # In the encoder, and in the "uni" decoder, they are added to embeddings; in other decoders to H^L,
        # which a LayerNorm has scaled to 1 and next to which N(0, init_std) would be lost.
        config = self.config
        sinusoid_(self.encoder.position_embedding.weight, config.init_std)
        if self.decoder is not None:
            std = config.init_std if config.decoder_self == "uni" else config.decoder_position_std
            sinusoid_(self.decoder.position_embedding.weight, std)

    def forward(self, tokens: Tensor, corruption: Corruption) -> Tensor:
        """tokens (B, n) int64 and their corruption, with exactly masks_per_row(n) masks in each row -> the
        loss, a scalar: the mean of -log p(x_i | x-hat) over the positions of `predicted`, in nats; Eq. (1).
        `encode`, `decode` and `logits` lead to it; the first two get these positions as `at`."""
        at = self.predicted(corruption.masked)  # (B, k)
        h = self.encode(corruption, at)  # H^L (B, m, d)
        z = self.decode(h, tokens, corruption, at)  # (B, k, decoder_dim)
        logits = self.logits(z)  # (B, k, V)
        # Differs from the paper: Eq. (1) is the sum over M; its code and ours take the mean.
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.gather(1, at).flatten())

    def predicted(self, masked: Tensor) -> Tensor:
        """Positions (B, k) int64 of the loss, from M (B, n) bool: M, or for "uni" all but the first."""
        B, n = masked.shape
        if self.config.decoder_self == "uni":
            return torch.arange(1, n, device=masked.device).expand(B, -1)
        return masked.int().topk(self.config.masks_per_row(n)).indices  # of fixed size, unlike nonzero

    def encode(self, corruption: Corruption, at: Tensor | None = None) -> Tensor:
        """The encoder on what is kept -> H^L (B, m, d). Standard MLM, whose encoder itself predicts, needs it
        only at the predicted positions at (B, k) int64 -> (B, k, d)."""
        masked, kept, tokens = corruption
        m = kept.shape[1]
        positions = torch.arange(m, device=kept.device)[None]  # (1, m): one bias for the whole batch
        nothing_removed = m == masked.shape[1]  # then `kept` holds the same, B times
        if self.config.aligned_positions and not nothing_removed:
            positions = kept
        # Without a decoder nothing is removed, so the positions `at` are indices among the m as well.
        return self.encoder(tokens, positions, at=at if self.decoder is None else None)

    def decode(self, h: Tensor, tokens: Tensor, corruption: Corruption, at: Tensor) -> Tensor:
        """H^L (B, m, d) -> what the head reads at positions at (B, k) int64: (B, k, decoder_dim). The true
        tokens (B, n) are read by the "uni" decoder only. Standard MLM has no decoder: h as it is."""
        if self.decoder is None:
            return h
        if self.config.decoder_self == "uni":
            # As BART's: position i reads x_{i-1}, and the text by cross-attention. h_i would tell it x_i.
            shifted = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
            x = self.encoder.token_embedding(shifted)
        else:
            x = self.decoder_input(h, corruption)  # H-hat^0 (B, n, d)
        return self.decoder(x, h, at)

    def decoder_input(self, h: Tensor, corruption: Corruption) -> Tensor:
        """H-hat^0 of section 3 without p_i, (B, n, d) in the dtype of h: h_i^L (B, m, d) at the kept
        positions, and e_[MASK], the encoder's embedding of MASK, at all others. With decoder_reset, e_[MASK]
        is at all masked positions, kept or not. Gradients reach h and e_[MASK]."""
        masked, kept, _ = corruption
        B, n = masked.shape
        e_mask = self.encoder.token_embedding.weight[MASK].to(h.dtype)  # (d,)
        row = torch.arange(B, device=h.device)[:, None]
        x = e_mask.expand(B, n, -1).index_put((row, kept), h)
        if self.config.decoder_reset:  # Table 2: forget what the encoder made of the [MASK]s that it read
            x = torch.where(masked[:, :, None], e_mask, x)
        return x

    def logits(self, z: Tensor) -> Tensor:
        """(B, k, decoder_dim) -> (B, k, V), with the token embeddings of the encoder."""
        return self.head(z, self.encoder.token_embedding.weight)


def sinusoid_(table: Tensor, std: float) -> None:
    """Fill position embeddings (n, d) in place with waves of standard deviation std; Vaswani et al., 2017."""
    n, d = table.shape
    rates = 10000 ** -torch.linspace(0, 1, (d + 1) // 2, device=table.device)
    angle = torch.arange(n, device=table.device)[:, None] * rates  # (n, d / 2)
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :d]  # for an odd d, one wave less
    table.data.copy_(std * 2 ** 0.5 * waves)  # a wave of amplitude sqrt(2) has deviation 1
