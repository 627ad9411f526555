"""MAE-LM, the masked autoencoder for language of Meng et al., "Representation Deficiency in Masked Language
Modeling", ICLR 2024. A masked language model spends dimensions on [MASK], a token that no downstream text
contains (section 2). MAE-LM removes masked positions from the encoder, lets a shallow decoder predict them,
and keeps only the encoder (section 3). Figure 2, for M = {2, 5}:

    x      the   cat   sat   on    the   mat
            |     |           |     |
         [       encoder, L layers       ]       reads real tokens only, at their original positions
            |     |           |     |
           h_0   h_1 [MASK]  h_3   h_4 [MASK]    e_[MASK] fills the gaps, then + p_i
         [       decoder, 4 layers       ]       thrown away after pre-training
                       |                 |
                      sat               mat      predicted at the masked positions only

    symbol           name here                             shape
    x, M             tokens, Corruption.masked             (B, n), k of each row are in M
    i not in M, x_i  Corruption.kept, .tokens              (B, m), m = n - k (the paper's m is our k)
    e_x, p_i         token_embedding, position_embedding   (V, d), (n, d)
    H^l, H-hat^0     states; x + p_i in Decoder.forward    (B, m, d), (B, n, d)

Only for speed, skip at first: the lookup in RelativeBias.forward, F.pad to 8, and the argument `at` of the
layers: the last one computes only these positions.
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
    """What is computed; by default, the paper's base. ValueError for a wrong field."""
    vocab_size: int = 32768  # special tokens, bytes, merges
    seq_len: int = 512  # n, tokens in a row
    encoder_layers: int = 12  # L
    encoder_dim: int = 768  # d
    encoder_heads: int = 12  # N; the decoder's heads have the same size, d / N
    dropout: float = 0.1  # of the encoder; the decoder has none (App. C)
    norm: str = "post"  # post | pre: LayerNorm after or before sub-layers
    init_std: float = 0.02  # of initial weights
    position_init: str = "normal"  # normal | sinusoid: where learned positions start
    mask_rate: float = 0.15  # share of a row that is predicted
    mask_in_encoder: float = 0.0  # delta of Figure 4, 0 to 1: share of masks that the encoder reads
    encoder_fill: str = "mask"  # mask | random: what it reads there
    decoder_reset: bool = False  # the decoder reads e_[MASK] at all masks
    aligned_positions: bool = True  # kept tokens keep their positions; else 0 to m - 1
    rel_pos_buckets: int = 32  # of relative positions in the encoder; 0 = none
    rel_pos_max_distance: int = 128  # the last bucket starts before this distance
    decoder_layers: int = 4  # 0 = none: the encoder predicts, as in standard MLM
    decoder_dim: int = 0  # 0 = encoder_dim
    decoder_relative: bool = False  # relative positions in a "bi" decoder, too
    decoder_self: str = "bi"  # bi | uni | none: the decoder's self-attention
    decoder_cross: bool = False  # the decoder attends to the encoder's output

    def __post_init__(self):
        d, heads, buckets = self.encoder_dim, self.encoder_heads, self.rel_pos_buckets
        head_size = max(1, d // max(1, heads))
        whole_heads = self.decoder_dim >= 0 and self.decoder_dim % head_size == 0
        attentions = ("bi", "uni", "none") if self.decoder_cross else ("bi",)
        mlm = self.decoder_layers == 0 and self.mask_in_encoder == 1 and not self.decoder_cross
        rules = [  # field, whether its value is valid, what is valid
            ("vocab_size", self.vocab_size > 260, "261 or more"),
            ("seq_len", self.seq_len > 1, "2 or more"),
            ("encoder_layers", self.encoder_layers > 0, "1 or more"),
            ("encoder_heads", d > 0 and heads > 0 and d % heads == 0, f"a divisor of encoder_dim={d}"),
            ("dropout", 0 <= self.dropout < 1, "0 or more, below 1"),
            ("norm", self.norm in ("post", "pre"), "post or pre"),
            ("position_init", self.position_init in ("normal", "sinusoid"), "normal or sinusoid"),
            ("mask_rate", 0 < self.mask_rate < 1, "between 0 and 1"),
            ("mask_in_encoder", 0 <= self.mask_in_encoder <= 1, "0 to 1"),
            ("encoder_fill", self.encoder_fill in ("mask", "random"), "mask or random"),
            ("rel_pos_buckets", buckets == 0 or (buckets > 3 and buckets % 2 == 0), "0, 4, 6, 8 ..."),
            ("rel_pos_max_distance", self.rel_pos_max_distance > buckets // 4, f"{buckets // 4 + 1} or more"),
            ("decoder_layers", self.decoder_layers > 0 or mlm, "1 or more, or mask_in_encoder=1"),
            ("decoder_dim", whole_heads, f"a multiple of the head size {head_size}"),
            ("decoder_self", self.decoder_self in attentions, "bi (uni, none: with decoder_cross)"),
        ]
        for field, possible, what in rules:
            if not possible:
                raise ValueError(f"{field}={getattr(self, field)!r}: use {what}")

    @property
    def decoder_width(self):
        """The dimension of what the head reads."""
        return self.decoder_dim if self.decoder_dim and self.decoder_layers else self.encoder_dim

    def masks_per_row(self, n):
        """k, the masks in a row of n tokens."""
        return round(self.mask_rate * n)


# Differs from the paper: with these, small models learn in minutes; bench/results/presets.md.
SMALL = dict(norm="pre", position_init="sinusoid", decoder_relative=True)
PRESETS = {  # as differences from the defaults
    "toy": dict(vocab_size=2048, seq_len=64, encoder_layers=3, encoder_dim=128, encoder_heads=2,
                decoder_layers=1, dropout=0.0, init_std=0.06, **SMALL),
    "small": dict(vocab_size=8192, seq_len=128, encoder_layers=6, encoder_dim=384, encoder_heads=6,
                  decoder_layers=2, init_std=0.03, **SMALL),
    "base": dict(),
    "base++": dict(vocab_size=64000, rel_pos_buckets=64),
    "large++": dict(vocab_size=64000, encoder_layers=24, encoder_dim=1024, encoder_heads=16,
                    rel_pos_buckets=128, rel_pos_max_distance=256),
}
PRESETS["laptop"] = PRESETS["toy"]  # trained for longer

ABLATIONS = {  # Table 2, as differences from MAE-LM
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
    """A masked batch. The encoder cannot see removed positions: neither `kept` nor `tokens` has them."""
    masked: Tensor  # (B, n) bool, the set M
    kept: Tensor  # (B, m) int64, positions that the encoder reads, ascending
    tokens: Tensor  # (B, m) int64, what it reads there


def corrupt(tokens, config, generator, maskable=None):
    """Draw M, k of each row's tokens that are not special, or of the positions where maskable (B, n) bool is
    True. Remove all of M but a share mask_in_encoder. tokens (B, n) int64 -> Corruption. ValueError if a row
    has fewer than k, or k is 0."""
    B, n = tokens.shape
    k = config.masks_per_row(n)
    if maskable is None:
        maskable = tokens >= NUM_SPECIAL
    fewest = int(maskable.sum(1).min())
    if not 0 < k <= fewest:
        raise ValueError(f"mask_rate={config.mask_rate} masks {k} of {n} tokens in a row: use 1 to {fewest}")

    # A random number for each position: those with the k smallest are M.
    order = torch.rand(B, n, generator=generator, device=tokens.device)
    order = order.masked_fill(~maskable, 2.0)  # above all others
    chosen = order.topk(k, largest=False).indices  # (B, k)
    nowhere = torch.zeros_like(maskable)
    masked = nowhere.scatter(1, chosen, True)

    # `chosen` is sorted by these numbers, so any slice of it is random.
    shown = round(config.mask_in_encoder * k)  # 0 in MAE-LM
    removed = nowhere.scatter(1, chosen[:, shown:], True)

    # nonzero() goes row by row, and every row has m kept positions.
    kept = (~removed).nonzero()[:, 1].view(B, -1)  # (B, m)

    # At masks that stay, the encoder reads [MASK] or a random token.
    fill = torch.full_like(tokens, MASK)
    if config.encoder_fill == "random":
        fill.random_(NUM_SPECIAL, config.vocab_size, generator=generator)
    read = torch.where(masked, fill, tokens)
    return Corruption(masked, kept, read.gather(1, kept))


# ---- 3. Relative positions: section 4.1 (Raffel et al., 2019), App. C --------------------------------------
def relative_bucket(distance, num_buckets, max_distance):
    """T5's buckets of key position - query position, int64 of any shape -> int64: the upper half for keys to
    the right; near ones have a bucket each, far ones share."""
    # Differs from the paper: the text cites T5, but its code has another formula.
    half = num_buckets // 2
    exact = half // 2  # sizes below this have their own bucket
    size = distance.abs()

    # From `exact` (share 0) to max_distance (share 1), in equal steps of the logarithm. float64 and 1e-9:
    # otherwise rounding could turn an exact 3 into 2.999, so 2.
    share = (size.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact)
    far = exact + ((half - exact) * share + 1e-9).long()
    far = far.clamp(max=half - 1)  # the last bucket has no limit
    bucket = torch.where(size < exact, size, far)
    return torch.where(distance > 0, half + bucket, bucket)


class RelativeBias(nn.Module):
    """A learned number for each bucket and head, added to attention logits; all layers share it."""
    def __init__(self, config, heads):
        super().__init__()
        self.table = nn.Embedding(config.rel_pos_buckets, heads)
        distance = torch.arange(1 - config.seq_len, config.seq_len)  # (2n - 1,)
        bucket = relative_bucket(distance, config.rel_pos_buckets, config.rel_pos_max_distance)
        self.register_buffer("bucket", bucket, persistent=False)

    def forward(self, queries, keys):
        """Positions (B, n_q) and (B, n_k) int64, one B may be 1 -> bias (B, heads, n_q, n_k)."""
        # Equals self.table(bucket of keys - queries) with the heads in front. By one gather per head, a step
        # of the toy takes 10 % less time.
        n_k = keys.shape[1]
        keys = F.pad(keys, (0, -n_k % 8))  # GPU kernels want rows of 8, 16, ...
        values = self.table(self.bucket).t()  # (heads, 2n - 1)
        zero = len(self.bucket) // 2  # where distance 0 is
        index = keys[:, None, :] - queries[:, :, None] + zero  # (B, n_q, n_k)
        B, n_q, padded = index.shape
        heads = len(values)
        flat = index.view(B, 1, n_q * padded).expand(-1, heads, -1)
        bias = values.expand(B, -1, -1).gather(2, flat).view(B, heads, n_q, padded)
        if bias.is_cuda and torch.is_autocast_enabled("cuda"):
            # Cast before the slice, as a copy drops the padding.
            bias = bias.to(torch.get_autocast_dtype("cuda"))
        return bias[..., :n_k]


def causal_bias(queries, keys):
    """Positions (B, n_q) and (B, n_k) -> (B, 1, n_q, n_k): -inf for keys after the query, else 0."""
    future = keys[:, None, None, :] > queries[:, None, :, None]
    return torch.zeros(future.shape, device=keys.device).masked_fill(future, -torch.inf)


# ---- 4. Transformer layers: section 2.1 --------------------------------------------------------------------
def attention(q, k, v, bias=None, p=0.0):
    """Softmax(Q K^T / sqrt(d_h) + bias) V, dropout p on the softmax. q (B, heads, n_q, d_h), k and v (B,
    heads, n_k, d_h), bias broadcastable to (B, heads, n_q, n_k) -> (B, heads, n_q, d_h)."""
    if q.is_cuda:
        # One fused kernel. On a CPU the formula is faster.
        bias = bias.to(q.dtype) if bias is not None else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
    d_h = q.shape[-1]
    logits = (q * d_h ** -0.5) @ k.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias
    weights = logits.float().softmax(dim=-1).to(q.dtype)
    return F.dropout(weights, p) @ v


class Attention(nn.Module):
    """MHSA of section 2.1: head_h = Attn(X W_h^Q, Y W_h^K, Y W_h^V), Concat(head_1 ... head_N) W^O."""
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.p = heads, dropout
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x, y, bias=None):
        """Queries of x (B, n_q, d), keys and values of y (B, n_k, d) -> (B, n_q, d); y is x or memory."""
        def split(z):
            return z.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, n, d_h)

        # One matrix for all heads: W^Q = [W_1^Q ... W_N^Q].
        q = split(self.query(x))
        k, v = self.key_value(y).chunk(2, dim=-1)
        p = self.p if self.training else 0.0
        z = attention(q, split(k), split(v), bias, p)  # (B, heads, n_q, d_h)
        return self.output(z.transpose(1, 2).flatten(2))  # the heads side by side: (B, n_q, d)


def select(x, at):
    """x (B, n, d) at the positions `at` (B, k) int64: (B, k, d); all of x for None."""
    if at is None:
        return x
    row = torch.arange(len(at), device=at.device)[:, None]
    return x[row, at]


class Residual(nn.Module):
    """A sub-layer f with its skip connection: LayerNorm(x + f(x)), or for pre x + f(LayerNorm(x))."""
    def __init__(self, config, dim, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.p = dropout
        self.pre = config.norm == "pre"

    def forward(self, x, f, at=None):
        """x (B, n, d) -> (B, n, d), or (B, k, d) if f returns only the positions `at` (B, k)."""
        fx = f(self.norm(x) if self.pre else x)
        x = select(x, at) + F.dropout(fx, self.p, self.training)
        if self.pre:
            return x
        return self.norm(x).to(fx.dtype)  # autocast's LayerNorm returns float32


class Block(nn.Module):
    """A Transformer layer: self-attention, cross-attention, FFN."""
    def __init__(self, config, dim, dropout, self_attention=True, cross_attention=False):
        super().__init__()
        heads = dim * config.encoder_heads // config.encoder_dim
        self.self_attention = None
        self.cross_attention = None
        if self_attention:
            self.self_attention = Attention(dim, heads, dropout)
            self.self_residual = Residual(config, dim, dropout)
        if cross_attention:
            self.cross_attention = Attention(dim, heads, dropout)
            self.cross_residual = Residual(config, dim, dropout)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.ffn_residual = Residual(config, dim, dropout)

    def forward(self, x, bias=None, memory=None, at=None):
        """x (B, n, d), memory (B, m, d) -> (B, n, d), or (B, k, d) at the positions `at` (B, k)."""
        if self.self_attention is None:
            x = select(x, at)
        else:
            # Keys and values are of all positions, queries only of those in `at`.
            x = self.self_residual(x, lambda y: self.self_attention(select(y, at), y, bias), at)
        if self.cross_attention is not None:
            x = self.cross_residual(x, lambda y: self.cross_attention(y, memory))
        return self.ffn_residual(x, self.ffn)


class Stack(nn.Module):
    """Layers 1 to L with the bias of one `rule`: a RelativeBias, causal_bias or None."""
    def __init__(self, config, dim, layers, dropout, rule, self_attention=True, cross_attention=False):
        super().__init__()
        self.rule = rule
        blocks = [Block(config, dim, dropout, self_attention, cross_attention) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        # Post-LN layers end with a LayerNorm, pre-LN layers do not.
        self.final_norm = nn.LayerNorm(dim) if config.norm == "pre" else nn.Identity()

    def forward(self, x, positions, padding=None, memory=None, at=None):
        """H^0, x (B, n, d), and memory (B, m, d) -> [H^0, ..., H^L]; the other arguments as in Encoder."""
        states = [x]
        *lower, top = self.blocks
        if lower or at is None:
            bias = self.bias(positions, positions, padding)
        for block in lower:
            states.append(block(states[-1], bias, memory))
        if at is not None:
            queries = positions.expand(len(at), -1).gather(1, at)
            bias = self.bias(queries, positions, padding)
        states.append(self.final_norm(top(states[-1], bias, memory, at)))
        return states

    def bias(self, queries, keys, padding):
        """The rule's bias, and -inf where a key is padding; None if all is 0."""
        bias = self.rule(queries, keys) if self.rule is not None else None
        if padding is not None:
            hidden = padding[:, None, None, :]  # (B, 1, 1, n_k)
            bias = torch.zeros_like(hidden, dtype=torch.float32) if bias is None else bias
            bias = bias.masked_fill(hidden, -torch.inf)
            n_k = padding.shape[1]
            bias = F.pad(bias, (0, -n_k % 8))[..., :n_k]  # as in RelativeBias
        return bias


# ---- 5. Encoder: H^0 of section 3 to H^L -------------------------------------------------------------------
class Encoder(nn.Module):
    """What is kept. It reads real tokens at their original positions; section 3."""
    def __init__(self, config):
        super().__init__()
        d = config.encoder_dim
        self.token_embedding = nn.Embedding(config.vocab_size, d)
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = nn.LayerNorm(d)
        self.p = config.dropout
        rule = RelativeBias(config, config.encoder_heads) if config.rel_pos_buckets > 0 else None
        self.stack = Stack(config, d, config.encoder_layers, config.dropout, rule)

    def forward(self, tokens, positions, padding=None, all_layers=False, at=None):
        """tokens (B, m) int64 at positions (B, m) or (1, m), padding (B, m) bool, True = ignore -> H^L
        (B, m, d), or (B, k, d) at the indices `at` (B, k); with all_layers [H^0, ..., H^L]."""
        h = self.token_embedding(tokens) + self.position_embedding(positions)  # h_i^0 = e_{x_i} + p_i
        # Differs from the paper: its formula has no LayerNorm; its code has.
        h = F.dropout(self.norm(h), self.p, self.training)
        states = self.stack(h, positions, padding, at=at)
        return states if all_layers else states[-1]


# ---- 6. Decoder: section 3 ---------------------------------------------------------------------------------
class Decoder(nn.Module):
    """A shallow stack over all n positions, for pre-training only."""
    def __init__(self, config):
        super().__init__()
        d = config.decoder_width
        # Table 2 has decoders of another width.
        self.project = nn.Linear(config.encoder_dim, d) if config.encoder_dim != d else nn.Identity()
        # Differs from the paper: it has one p_i; here, as in its code, the decoder has its own.
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = nn.LayerNorm(d)
        self.cross = config.decoder_cross
        rule = None
        if config.decoder_self == "uni":
            rule = causal_bias
        elif config.decoder_self == "bi" and config.decoder_relative and config.rel_pos_buckets > 0:
            rule = RelativeBias(config, d * config.encoder_heads // config.encoder_dim)
        self_attention = config.decoder_self != "none"
        self.stack = Stack(config, d, config.decoder_layers, 0.0, rule, self_attention, self.cross)

    def forward(self, x, memory, positions, padding=None, at=None):
        """x (B, n, d), H-hat^0 without p_i, and memory H^L (B, m, d) -> (B, n, decoder_width), or with `at`
        (B, k, decoder_width); the others as in Encoder."""
        x = self.project(x) + self.position_embedding(positions)  # h-hat_i^0; x is e_[MASK] or h_i^L
        memory = self.project(memory) if self.cross else None
        return self.stack(self.norm(x), positions, padding, memory, at)[-1]


# ---- 7. The model and its loss: Eq. (1) --------------------------------------------------------------------
class Head(nn.Module):
    """Logits e_x^T h over the vocabulary, e_x the encoder's token embeddings E; Eq. (1)."""
    def __init__(self, config):
        super().__init__()
        d = config.encoder_dim
        # Differs from the paper: Eq. (1) has e_x^T h_i; its code transforms h_i first.
        self.transform = nn.Sequential(nn.Linear(config.decoder_width, d), nn.GELU(), nn.LayerNorm(d))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, h, embeddings):
        """h (B, k, decoder_width), E (V, d) -> logits (B, k, V)."""
        return F.linear(self.transform(h), embeddings, self.bias)


class MAELM(nn.Module):
    """The masked autoencoder, and by its Config every row of Table 2."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config) if config.decoder_layers > 0 else None
        self.head = Head(config)
        self.init_parameters()

    def init_parameters(self):
        """Matrices and embeddings N(0, init_std), or sinusoids; biases 0, gains of LayerNorms 1."""
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)
        if self.config.position_init == "sinusoid":
            sinusoid_(self.encoder.position_embedding.weight, std)
            if self.decoder is not None:
                # Between std, which is lost beside h_i^L (about 1), and 1, which takes up its dimensions.
                decoder_std = std if self.config.decoder_self == "uni" else 0.25
                sinusoid_(self.decoder.position_embedding.weight, decoder_std)

    def forward(self, tokens, corruption):
        """tokens (B, n) int64 and their corruption -> the mean of -log p(x_i | x-hat), in nats; Eq. (1)."""
        at = self.predicted(corruption.masked)  # (B, k)
        h = self.encode(corruption, at)  # H^L (B, m, d); for standard MLM (B, k, d)
        z = self.decode(h, tokens, corruption, at)  # (B, k, decoder_width)
        logits = self.head(z, self.encoder.token_embedding.weight)  # (B, k, V)
        # Differs from the paper: Eq. (1) is a sum; here, as in its code, a mean.
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.gather(1, at).flatten())

    def predicted(self, masked):
        """M (B, n) bool -> positions (B, k) int64 of the loss: M, or for "uni" 1 to n - 1, masked or not."""
        B, n = masked.shape
        if self.config.decoder_self == "uni":
            return torch.arange(1, n, device=masked.device).expand(B, -1)
        return masked.int().topk(self.config.masks_per_row(n)).indices  # a shape that torch.compile knows

    def encode(self, corruption, at=None):
        """The encoder on what is kept -> H^L (B, m, d); for standard MLM only the positions `at` (B, k)."""
        masked, kept, tokens = corruption
        m = kept.shape[1]
        positions = torch.arange(m, device=kept.device)[None]  # (1, m): all rows share a bias
        if self.config.aligned_positions and m < masked.shape[1]:
            positions = kept
        return self.encoder(tokens, positions, at=at if self.decoder is None else None)

    def decode(self, h, tokens, corruption, at):
        """H^L (B, m, d) -> what the head reads at the positions `at`: (B, k, decoder_width)."""
        if self.decoder is None:  # standard MLM: h is of these already
            return h
        if self.config.decoder_self == "uni":
            # As in BART, position i reads x_{i-1}.
            shifted = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
            x = self.encoder.token_embedding(shifted)
        else:
            x = self.decoder_input(h, corruption)  # (B, n, d)
        positions = torch.arange(x.shape[1], device=x.device)[None]  # (1, n)
        return self.decoder(x, h, positions, at=at)

    def decoder_input(self, h, corruption):
        """H-hat^0 without p_i, (B, n, d): h_i^L of h (B, m, d) at kept positions, e_[MASK] elsewhere."""
        masked, kept, _ = corruption
        B, n = masked.shape
        e_mask = self.encoder.token_embedding.weight[MASK].to(h.dtype)  # (d,)
        row = torch.arange(B, device=h.device)[:, None]
        x = e_mask.expand(B, n, -1).index_put((row, kept), h)
        if self.config.decoder_reset:  # forget what the encoder made of [MASK]
            x = torch.where(masked[:, :, None], e_mask, x)
        return x


def sinusoid_(table, std):
    """Fill a table (n, d) with waves of root mean square std; Vaswani et al., 2017."""
    n, d = table.shape
    rates = 10000 ** -torch.linspace(0, 1, (d + 1) // 2, device=table.device)
    angle = torch.arange(n, device=table.device)[:, None] * rates  # (n, d / 2)
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)[:, :d]  # an odd d has one less
    table.data.copy_(std * 2 ** 0.5 * waves)  # sin and cos have 1 / sqrt(2)
