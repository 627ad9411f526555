"""MAE-LM: the masked autoencoder for language of Meng et al., "Representation Deficiency in Masked Language
Modeling", 2024.

A masked language model spends model dimensions on [MASK], a token that no downstream text contains, so the
representations of real tokens are rank-deficient (section 2). MAE-LM takes the masked positions out of the
encoder, lets a shallow decoder predict them, and keeps only the encoder (section 3). Figure 2, M = {2, 5}:

    x      the   cat   sat   on    the   mat
            |     |           |     |
         [       encoder, L layers       ]       reads real tokens only, at their original positions
            |     |           |     |
           h_0   h_1 [MASK]  h_3   h_4 [MASK]    e_[MASK] fills the gaps, then + p_i
         [       decoder, 4 layers       ]       thrown away after pre-training
                       |                 |
                      sat               mat      predicted at the masked positions only

    symbol           name here                               shape
    x, M             tokens, Corruption.masked               (B, n) int64; (B, n) bool, k True a row
    i not in M, x_i  Corruption.kept, .tokens                (B, m) int64, in order: what the encoder reads
    e_x, p_i         token_embedding, position_embedding     (V, d), (n, d)
    H^l, H-hat^0     h, states; x in MAELM.decode            (B, m, d), (B, n, d)
    (Here m counts the tokens that the encoder reads, n - k; in section 2 it counts the masks, k here.)

    equation                                                 function
    2.1  Attn(Q, K, V) = Softmax(Q K^T / sqrt(d_h)) V        attention; MHSA: Attention.forward
    3    h_i^0 = e_{x_i} + p_i for i not in M                corrupt, Encoder.forward
    3    h-hat_i^0 = e_[MASK] + p_i or h_i^L + p_i           MAELM.decoder_input, Decoder.forward
    (1)  -log p(x_i | x-hat) over i in M                     Head.forward, MAELM.forward
    2.2  rank_tau; Eq. (3); epsilon of Theorem 2.2           in rank.py: tau_rank; both_sides

The figure in code (`python -m doctest maelm.py` runs it):

    >>> x = torch.tensor([[10, 11, 12, 13, 10, 14]])  # the cat sat on the mat
    >>> M = torch.tensor([[0, 0, 1, 0, 0, 1]]).bool()
    >>> c = Corruption(masked=M, kept=torch.tensor([[0, 1, 3, 4]]), tokens=torch.tensor([[10, 11, 13, 10]]))
    >>> model = MAELM(Config(vocab_size=300, seq_len=6, encoder_dim=8, encoder_heads=2, mask_rate=1 / 3))
    >>> h = model.encode(c)
    >>> h.shape, model.decoder_input(h, c).shape, model(x, c).shape
    (torch.Size([1, 4, 8]), torch.Size([1, 6, 8]), torch.Size([]))
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLS, PAD, SEP, MASK, NUM_SPECIAL = range(5)  # the first token ids; bytes and merges follow


# ---- 1. Configuration: section 4.1, Tables 2 and 4 ---------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """What is computed. The defaults are the paper's base setting; raises ValueError naming a bad field."""
    vocab_size: int = 32768  # 4 special tokens, 256 bytes and the merges in all
    seq_len: int = 512  # n, tokens in a row
    encoder_layers: int = 12  # L
    encoder_dim: int = 768  # d
    encoder_heads: int = 12  # N; the decoder's heads have the same size d / N
    dropout: float = 0.1  # in the encoder; the decoder has none (App. C)
    norm: str = "post"  # post | pre: LayerNorm after or before each sub-layer
    init_std: float = 0.02  # standard deviation of all initial weights
    position_init: str = "normal"  # normal | sinusoid: where learned absolute positions start
    decoder_position_std: float = 1.0  # deviation of the decoder's sinusoids; what they are added to has 1
    mask_rate: float = 0.15  # share of a row that is predicted
    mask_in_encoder: float = 0.0  # delta of Figure 4: share of masked positions that the encoder reads
    encoder_fill: str = "mask"  # mask | random: the token that it reads at such a position
    bert_trick: bool = False  # it reads 80 % [MASK], 10 % random and 10 % unchanged tokens there (footnote 1)
    decoder_reset: bool = False  # decoder reads e_[MASK], not h_i, at every masked position
    aligned_positions: bool = True  # encoder positions skip the removed tokens
    rel_pos_buckets: int = 32  # of the encoder's relative positions; 0 = none
    rel_pos_max_distance: int = 128  # all distances from here on share a bucket
    decoder_layers: int = 4  # 0 = none: the encoder predicts, as in standard MLM
    decoder_dim: int = 0  # 0 = encoder_dim
    decoder_self: str = "bi"  # bi | uni | none: the decoder's self-attention
    decoder_cross: bool = False  # attention to the encoder's output

    def __post_init__(self):
        def check(field: str, sound: bool, remedy: str) -> None:
            check_field(self, field, sound, remedy)

        check("vocab_size", self.vocab_size > 260, "use 261 or more: 4 special tokens, 256 bytes, and merges")
        check("seq_len", self.seq_len > 1, "use 2 or more")
        check("encoder_layers", self.encoder_layers > 0, "use 1 or more")
        check("encoder_dim", self.encoder_dim > 0, "use 1 or more")
        check("encoder_heads", self.encoder_heads > 0, "use 1 or more")
        check("encoder_heads", self.encoder_dim % self.encoder_heads == 0,
              f"use a divisor of encoder_dim={self.encoder_dim}")
        check("dropout", 0 <= self.dropout < 1, "use 0 <= dropout < 1")
        check("norm", self.norm in ("post", "pre"), "use post or pre")
        check("init_std", self.init_std > 0, "use a positive number")
        check("position_init", self.position_init in ("normal", "sinusoid"), "use normal or sinusoid")
        check("decoder_position_std", self.decoder_position_std > 0, "use a positive number")
        check("mask_rate", 0 < self.mask_rate < 1, "use 0 < mask_rate < 1")
        check("mask_in_encoder", 0 <= self.mask_in_encoder <= 1, "use 0 <= mask_in_encoder <= 1")
        check("encoder_fill", self.encoder_fill in ("mask", "random"), "use mask or random")
        check("rel_pos_buckets", self.rel_pos_buckets == 0 or self.rel_pos_buckets >= 4, "use 0 or 4 or more")
        check("rel_pos_buckets", self.rel_pos_buckets % 2 == 0, "use an even number: half for either side")
        check("rel_pos_max_distance", self.rel_pos_max_distance > self.rel_pos_buckets // 4,
              "use more than rel_pos_buckets / 4: so many distances have a bucket of their own")
        check("decoder_layers", self.decoder_layers >= 0, "use 0 or more")
        check("decoder_self", self.decoder_self in ("bi", "uni", "none"), "use bi, uni or none")
        check("decoder_self", self.decoder_self == "bi" or self.decoder_cross,
              "needs decoder_cross: such a decoder sees the text by cross-attention only")
        if self.decoder_dim == 0:  # filled in here; a frozen dataclass allows it so only
            object.__setattr__(self, "decoder_dim", self.encoder_dim)
        head_dim = self.encoder_dim // self.encoder_heads
        check("decoder_dim", self.decoder_dim > 0 and self.decoder_dim % head_dim == 0,
              f"use a multiple of the size of a head, {head_dim}")
        if self.decoder_layers == 0:
            check("decoder_layers", self.mask_in_encoder == 1,
                  "without a decoder the encoder predicts, so it must read every mask: mask_in_encoder=1")
            check("decoder_dim", self.decoder_dim == self.encoder_dim, "without a decoder, leave it at 0")
            check("decoder_cross", not self.decoder_cross, "without a decoder, leave it off")
        if self.bert_trick:
            check("bert_trick", self.mask_in_encoder > 0 and self.encoder_fill == "mask",
                  "needs mask_in_encoder > 0 and encoder_fill=mask: it is about [MASK] in the encoder")

    def masks_per_row(self, n: int) -> int:
        """k, the number of predicted positions in a row of n tokens: 77 of 512 at 15 % (App. C)."""
        return round(self.mask_rate * n)


def check_field(config, field: str, sound: bool, remedy: str) -> None:
    """Raise a ValueError that names the field, its value and the remedy, unless the value is sound."""
    if not sound:
        raise ValueError(f"{field}={getattr(config, field)!r}: {remedy}")


PRESETS = {  # as differences from the defaults; section 4.1 and Table 4
    "toy": dict(vocab_size=2048, seq_len=64, dropout=0.0,
                encoder_layers=3, encoder_dim=128, encoder_heads=2, decoder_layers=1,
                norm="pre", init_std=0.06, position_init="sinusoid"),
    "small": dict(vocab_size=8192, seq_len=128,
                  encoder_layers=6, encoder_dim=384, encoder_heads=6, decoder_layers=2,
                  norm="pre", init_std=0.03, position_init="sinusoid"),
    "base": dict(),
    "base++": dict(vocab_size=64000,
                   rel_pos_buckets=64),
    "large++": dict(vocab_size=64000,
                    encoder_layers=24, encoder_dim=1024, encoder_heads=16,
                    rel_pos_buckets=128, rel_pos_max_distance=256),
}
# The same model; train.py trains it for longer, and the decoder finds smaller positions, too (docs/toy.md).
PRESETS["laptop"] = PRESETS["toy"] | dict(decoder_position_std=0.25)

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


class Noise(NamedTuple):
    """All that is random in a corruption; its rows are independent of each other."""
    order: Tensor  # (B, n) float32 in [0, 1): where it is smallest is masked
    u: Tensor  # (B, n) float32 in [0, 1): chooses between the fills of footnote 1
    real: Tensor  # (B, n) int64: random tokens


def draw_noise(B: int, n: int, config: Config, generator: torch.Generator) -> Noise:
    """The random numbers for B rows of n tokens, on the generator's device. Cheap, so that of many processes
    each can draw them for the whole batch, and corrupt its own rows."""
    order, u = torch.rand(2, B, n, generator=generator, device=generator.device)
    real = torch.randint(NUM_SPECIAL, config.vocab_size, (B, n), generator=generator, device=generator.device)
    return Noise(order, u, real)


def corrupt(tokens: Tensor, config: Config, generator: torch.Generator | None = None,
            noise: Noise | None = None) -> Corruption:
    """Draw exactly k = config.masks_per_row(n) masked positions a row, any k of its real tokens (those with
    id >= NUM_SPECIAL) equally likely, and remove them; section 3. tokens (B, n) int64, on the generator's
    device. round(mask_in_encoder * k) of the masked positions, any of them equally likely, are not removed:
    the encoder reads a `fill` there. So each row keeps m = n - k + round(mask_in_encoder * k) positions.

    Pure: `tokens` is not changed, and the same generator state, or the same `noise` drawn before, gives the
    same result. Random numbers are those of `noise`, or else of draw_noise with this generator: one of the
    two is given.
    ValueError if k is 0 or if a row has fewer than k real tokens."""
    B, n = tokens.shape
    if noise is None:
        noise = draw_noise(B, n, config, generator)
    k = config.masks_per_row(n)
    special = tokens < NUM_SPECIAL
    fewest = n - int(special.sum(1).max())
    if not 0 < k <= fewest:
        raise ValueError(f"mask_rate={config.mask_rate} masks {k} of {n} tokens a row: use 1 to {fewest}")

    # One random number a position: those with the k smallest are the set M. Special tokens get a larger one.
    order = noise.order.masked_fill(special, 2.0)
    chosen = order.topk(k, largest=False).indices  # (B, k)
    none = torch.zeros_like(special)
    masked = none.scatter(1, chosen, True)

    # `chosen` is sorted by these numbers, not by position: its first entries are a random part of M.
    shown = round(config.mask_in_encoder * k)
    removed = none.scatter(1, chosen[:, shown:], True)

    # Each row loses exactly k - shown positions, so all rows keep equally many. nonzero() lists them row by
    # row, ascending: one long list that can be cut into B rows of equal length.
    kept = (~removed).nonzero()[:, 1].view(B, -1)  # (B, m)

    read = torch.where(masked, fill(tokens, config, noise), tokens)
    return Corruption(masked, kept, read.gather(1, kept))


def fill(tokens: Tensor, config: Config, noise: Noise) -> Tensor:
    """What the encoder reads at masked positions that are not removed: [MASK], a random token, or BERT's
    mixture of both and the true one. tokens (B, n) int64 -> (B, n) int64."""
    mask = torch.full_like(tokens, MASK)
    if config.bert_trick:  # 10 % random, 10 % unchanged, 80 % [MASK]; footnote 1
        return torch.where(noise.u < 0.1, noise.real, torch.where(noise.u < 0.2, tokens, mask))
    if config.encoder_fill == "random":
        return noise.real
    return mask


# ---- 3. Relative positions: section 4.1 (Raffel et al., 2019), App. C --------------------------------------
def relative_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """T5's bidirectional buckets of distance = key position - query position: int64 of any shape -> int64.
    The second half are for keys to the right (distance > 0). In each half, the first `exact` = half // 2 are
    single distances 0, 1, ..., the other r ranges that grow by a constant factor up to max_distance; from
    there on all share the last one. Range i of 0 ... r - 1 begins at exact * (max_distance / exact) ** (i /
    r), itself included: where that is a whole number, rounding must not make it more."""
    # Differs from the paper: its code has another formula, with one bucket unused; the text cites T5.
    half = num_buckets // 2
    exact = half // 2  # distances below this have a bucket of their own
    size = distance.abs()

    # From `exact` (share 0) to max_distance (share 1): equal steps on a logarithmic scale. In float64, and
    # with 1e-9 added, for where a range begins a whole number is due, and rounding must not make it less.
    share = (size.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact)
    far = exact + ((half - exact) * share + 1e-9).long()
    far = far.clamp(max=half - 1)

    bucket = torch.where(size < exact, size, far)
    return torch.where(distance > 0, half + bucket, bucket)


class RelativeBias(nn.Module):
    """One learned number for each bucket and head, added to attention logits; one table for all layers."""
    def __init__(self, config: Config):
        super().__init__()
        self.table = nn.Embedding(config.rel_pos_buckets, config.encoder_heads)
        distance = torch.arange(1 - config.seq_len, config.seq_len)  # all there are: (2n - 1,)
        bucket = relative_bucket(distance, config.rel_pos_buckets, config.rel_pos_max_distance)
        self.register_buffer("bucket", bucket, persistent=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Original positions (B, q) and (B, k) int64 -> (B, heads, q, k) in the dtype of the matrix products:
        [b, h, i, j] is head h's bias for the distance keys[b, j] - queries[b, i]."""
        # This is table[bucket[keys - queries]] with the heads in front. Written as a gather from one line of
        # numbers for each head, because a plain lookup, and turning its result, takes 1.7 times as long.
        k = keys.shape[1]
        keys = F.pad(keys, (0, -k % 8))  # GPU kernels want rows of the bias a multiple of 8 numbers apart
        values = self.table(self.bucket).t()  # (heads, 2n - 1), by distance
        smallest = -(len(self.bucket) // 2)  # the distance of the first of them
        index = keys[:, None, :] - queries[:, :, None] - smallest  # (B, q, k)
        B, q, padded = index.shape
        heads = len(values)
        flat = index.view(B, 1, q * padded).expand(-1, heads, -1)
        bias = values.expand(B, -1, -1).gather(2, flat).view(B, heads, q, padded)
        return bias.to(compute_dtype(bias))[..., :k]  # cast once, for all layers


def causal_bias(queries: Tensor, keys: Tensor) -> Tensor:
    """Positions (B, q) and (B, k) int64 -> (B, 1, q, k): -inf where the key comes after the query, else 0."""
    return hide(keys[:, None, None, :] > queries[:, None, :, None])


def hide(hidden: Tensor) -> Tensor:
    """A bias that is -inf where `hidden` (bool, any shape) is True, and 0 elsewhere."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -torch.inf)


def attention_bias(rule: RelativeBias | None, queries: Tensor, keys: Tensor, padding: Tensor | None = None):
    """What is added to the logits, or None: the bias by the `rule`, if any, and -inf at padded keys (B,
    k)."""
    bias = rule(queries, keys) if rule is not None else None
    if padding is None:
        return bias
    hidden = hide(padding)[:, None, None, :]  # (B, 1, 1, k)
    if bias is None:
        return hidden
    return bias + hidden.to(bias.dtype)


# ---- 4. Transformer layers: section 2.1 --------------------------------------------------------------------
def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with x: autocast's where it is on, else that of x, as the weights."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Softmax(Q K^T / sqrt(d_h) + bias) V with dropout p on the weights, section 2.1. q (B, heads, q, d_h), k
    and v (B, heads, k, d_h), bias None or broadcastable to (B, heads, q, k), -inf to hide a key
    -> (B, heads, q, d_h)."""
    if q.is_cuda:
        # One fused kernel (not cuDNN's: run.py turns that off). A CPU likes the formula better.
        bias = bias.to(q.dtype) if bias is not None else None  # the kernel wants one dtype
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
    d_h = q.shape[-1]
    logits = (q * d_h ** -0.5) @ k.transpose(-2, -1)  # (B, heads, q, k)
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
        """Queries from x (B, q, d), keys (first half of key_value) and values from y (B, k, d) -> (B, q, d).
        Head h has the h-th block of d / heads features; the bias is as in `attention`, for all heads. Dropout
        of the weights in training mode only."""
        def split(z: Tensor) -> Tensor:
            return z.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, length, d_h)

        # One matrix for all heads, W^Q = [W_1^Q ... W_N^Q], and so on; then the heads are split.
        q = split(self.query(x))
        k, v = self.key_value(y).chunk(2, dim=-1)
        p = self.p if self.training else 0.0
        z = attention(q, split(k), split(v), bias, p)  # (B, heads, q, d_h)
        return self.output(z.transpose(1, 2).flatten(2))  # the heads side by side: (B, q, d)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the dtype of its input, with float32 inside. Autocast would have a GPU return float32, and
    so move twice the bytes through every residual connection."""
    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) -> the same shape and dtype."""
        if not x.is_cuda:  # a CPU has it so, with float32 weights
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Residual(nn.Module):
    """A sub-layer f with its skip connection: LayerNorm(x + f(x)) for post, x + f(LayerNorm(x)) for pre."""
    def __init__(self, f: nn.Module, dim: int, norm: str, dropout: float):
        super().__init__()
        self.f = f
        self.norm = LayerNorm(dim)
        self.p = dropout
        self.pre = norm == "pre"

    def before(self, x: Tensor) -> Tensor:
        """What f reads of x (B, n, d)."""
        return self.norm(x) if self.pre else x

    def after(self, x: Tensor, fx: Tensor) -> Tensor:
        """The output of the sub-layer, from its input x (B, n, d) and fx = f(before(x))."""
        x = x + F.dropout(fx, self.p, self.training)
        return x if self.pre else self.norm(x)


def row_numbers(n: int, at: Tensor) -> Tensor:
    """Positions at (B, k) int64 of B sequences of n -> their numbers (B * k,) among all B * n rows."""
    first = n * torch.arange(len(at), device=at.device)[:, None]  # of each sequence
    return (first + at).flatten()


def take(x: Tensor, at: Tensor | None) -> Tensor:
    """The rows of x (B, n, d) at positions at (B, k) int64 -> (B, k, d); all of x for None."""
    if at is None:
        return x
    B, n, d = x.shape
    # Whole rows at a time: a gather would look every single number up.
    return x.reshape(B * n, d).index_select(0, row_numbers(n, at)).view(B, -1, d)


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
        """x (B, n, d), memory (B, m, d) -> (B, n, d). With `at` (B, k) int64 only these positions are
        computed, as the last layer may: their queries meet the keys and values of all n, so the result is
        just those rows."""
        # All tokens give keys and values; queries, and what is added to them, are at `at` alone.
        layer = self.self_attention
        if layer is None:
            x = take(x, at)
        else:
            keys = layer.before(x)
            x = layer.after(take(x, at), layer.f(take(keys, at), keys, bias))
        layer = self.cross_attention
        if layer is not None:
            x = layer.after(x, layer.f(layer.before(x), memory))
        layer = self.ffn
        return layer.after(x, layer.f(layer.before(x)))


# ---- 5. Encoder: H^0 of section 3 to H^L -------------------------------------------------------------------
class Encoder(nn.Module):
    """The model that is kept. Reads real tokens at their original positions; section 3, App. C."""
    def __init__(self, config: Config):
        super().__init__()
        d = config.encoder_dim
        self.token_embedding = nn.Embedding(config.vocab_size, d)
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = LayerNorm(d)
        self.p = config.dropout
        self.bias = RelativeBias(config) if config.rel_pos_buckets > 0 else None
        self.blocks = nn.ModuleList(Block(config, d, config.dropout) for _ in range(config.encoder_layers))
        # Post-LN layers end with a LayerNorm; pre-LN layers do not, and need one behind the last.
        self.final_norm = LayerNorm(d) if config.norm == "pre" else nn.Identity()

    def forward(self, tokens: Tensor, positions: Tensor, padding: Tensor | None = None,
                all_layers: bool = False, at: Tensor | None = None) -> Tensor | list[Tensor]:
        """tokens (B, m) int64 at original positions (B, m) or (1, m), padding (B, m) bool, True = ignore ->
        H^L (B, m, d), of these only the k with indices `at` (B, k) int64 among the m, if given; with
        all_layers the list H^0 ... H^L, of which `at` shortens the last. H^0 is `norm` of e_x + p_i, with
        dropout in training mode only, in compute_dtype; H^L is `final_norm` of the last block's output."""
        h = self.token_embedding(tokens) + self.position_embedding(positions)  # h_i^0 = e_{x_i} + p_i
        # Differs from the paper: its formula has no LayerNorm here; its code, like BERT, has.
        h = F.dropout(self.norm(h), self.p, self.training)
        states = [h.to(compute_dtype(h))]

        bias = attention_bias(self.bias, positions, positions, padding)
        for block in self.blocks[:-1]:
            states.append(block(states[-1], bias))
        if at is not None:  # the last layer has fewer queries
            queries = positions.expand(len(at), -1).gather(1, at)
            bias = attention_bias(self.bias, queries, positions, padding)
        last = self.blocks[-1](states[-1], bias, at=at)
        states.append(self.final_norm(last))
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
        self.norm = LayerNorm(d)
        self.bias = causal_bias if config.decoder_self == "uni" else None
        self.cross = config.decoder_cross
        self_attention = config.decoder_self != "none"
        self.blocks = nn.ModuleList(Block(config, d, 0.0, self_attention, self.cross)
                                    for _ in range(config.decoder_layers))
        self.final_norm = LayerNorm(d) if config.norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, at: Tensor, padding: Tensor | None = None) -> Tensor:
        """H-hat^0 (B, n, d) without p_i, memory H^L (B, m, d), at (B, k) int64, padding (B, n) bool, True =
        ignore -> (B, k, decoder_dim)."""
        positions = torch.arange(x.shape[1], device=x.device)[None]  # (1, n)
        x = self.project(x) + self.position_embedding(positions)  # h-hat_i^0 = e_[MASK] + p_i or h_i^L + p_i
        x = self.norm(x)
        x = x.to(compute_dtype(x))
        memory = self.project(memory) if self.cross else None
        for block in self.blocks[:-1]:
            x = block(x, attention_bias(self.bias, positions, positions, padding), memory)
        bias = attention_bias(self.bias, at, positions, padding)
        x = self.blocks[-1](x, bias, memory, at)  # only what is predicted
        return self.final_norm(x)


# ---- 7. The model and its loss: Eq. (1) --------------------------------------------------------------------
class Head(nn.Module):
    """Logits e_x^T h over the vocabulary, with the encoder's token embeddings E tied; Eq. (1)."""
    def __init__(self, config: Config):
        super().__init__()
        d = config.encoder_dim
        # Differs from the paper: Eq. (1) has e_x^T h_i alone; its code, like BERT, transforms h_i first.
        self.transform = nn.Sequential(nn.Linear(config.decoder_dim, d), nn.GELU(), LayerNorm(d))
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
        """N(0, init_std) for matrices and embeddings, but for positions what position_init says; 0 for
        biases, 1 for the gains of LayerNorms."""
        config = self.config
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # matrices and embeddings
                nn.init.normal_(parameter, std=config.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:  # gains of LayerNorms
                nn.init.ones_(parameter)
        if config.position_init == "sinusoid":
            # In the encoder, and in the "uni" decoder, they are added to embeddings. Other decoders add them
            # to H^L, which a LayerNorm has scaled to 1 and next to which N(0, init_std) would be lost.
            sinusoid_(self.encoder.position_embedding.weight, config.init_std)
            if self.decoder is not None:
                std = config.init_std if config.decoder_self == "uni" else config.decoder_position_std
                sinusoid_(self.decoder.position_embedding.weight, std)

    def forward(self, tokens: Tensor, corruption: Corruption) -> Tensor:
        """tokens (B, n) int64 and their corruption, with exactly masks_per_row(n) masks in each row -> the
        loss, a scalar: the mean of -log p(x_i | x-hat) over all predicted positions, in nats. Figure 2 and
        Eq. (1)."""
        at = self.predicted(corruption.masked)  # (B, k)
        h = self.encode(corruption, at)  # H^L (B, m, d)
        z = self.decode(h, tokens, corruption, at)  # (B, k, decoder_dim)
        logits = self.logits(z)  # (B, k, V)
        # Differs from the paper: Eq. (1) is the sum over M; its code and ours take the mean.
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.gather(1, at).flatten())

    def predicted(self, masked: Tensor) -> Tensor:
        """Positions (B, k) int64 of the loss, from M (B, n) bool: the k masked ones of each row; for the
        "uni" decoder, all but the first."""
        B, n = masked.shape
        if self.config.decoder_self == "uni":
            return torch.arange(1, n, device=masked.device).expand(B, -1)
        return masked.int().topk(self.config.masks_per_row(n)).indices  # of fixed size, unlike nonzero

    def encode(self, corruption: Corruption, at: Tensor | None = None) -> Tensor:
        """The encoder on what is kept -> H^L (B, m, d). Standard MLM, whose encoder itself predicts, computes
        its last layer at the predicted positions at (B, k) int64 alone -> (B, k, d)."""
        masked, kept, tokens = corruption
        m = kept.shape[1]
        positions = torch.arange(m, device=kept.device)[None]  # (1, m): one bias for the whole batch
        nothing_removed = m == masked.shape[1]  # then `kept` is just that, B times
        if self.config.aligned_positions and not nothing_removed:
            positions = kept
        # Without a decoder nothing is removed (Config): positions `at` are indices among the m as well.
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
        """H-hat^0 of section 3 without p_i, (B, n, d) in the dtype of h: h_i^L (B, m, d) back at the kept
        positions, and e_[MASK], the encoder's embedding of MASK, elsewhere; with decoder_reset at all masked
        positions."""
        masked, kept, _ = corruption
        B, n = masked.shape
        e_mask = self.encoder.token_embedding.weight[MASK].to(h.dtype)  # (d,)
        x = e_mask.expand(B * n, -1).index_copy(0, row_numbers(n, kept), h.flatten(0, 1))
        x = x.view(B, n, -1)
        if self.config.decoder_reset:  # Table 2: forget what the encoder made of the [MASK]s that it read
            x = torch.where(masked[:, :, None], e_mask, x)
        return x

    def logits(self, z: Tensor) -> Tensor:
        """(B, k, decoder_dim) -> (B, k, V), with the token embeddings of the encoder."""
        return self.head(z, self.encoder.token_embedding.weight)


def sinusoid_(table: Tensor, std: float) -> None:
    """Fill position embeddings (n, d) in place with waves of deviation std, like Vaswani et al., 2017."""
    n, d = table.shape
    rates = 10000 ** -torch.linspace(0, 1, (d + 1) // 2, device=table.device)
    angle = torch.arange(n, device=table.device)[:, None] * rates  # (n, d / 2)
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :d]  # for an odd d, one wave less
    table.data.copy_(std * 2 ** 0.5 * waves)  # a wave of amplitude sqrt(2) has deviation 1
