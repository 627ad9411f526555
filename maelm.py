"""MAE-LM: "Representation Deficiency in Masked Language Modeling" (Meng et al., ICLR 2024). A masked language
model (MLM) spends dimensions on [MASK], which no downstream text contains (section 2). MAE-LM removes masked
positions from the encoder and lets a shallow decoder predict them (section 3). Figure 2, for M = {2, 5}:

    x       the   cat   sat   on    the   mat
             |     |           |     |
          [       encoder, L layers       ]       reads real tokens only, at their original positions
             |     |           |     |
    H^L     h_0   h_1 [MASK]  h_3   h_4 [MASK]    e_[MASK] fills the gaps, plus the decoder's p_i
          [       decoder, 4 layers       ]       thrown away after pre-training, like the head
                         |                 |
                        sat               mat     predicted at the masked positions only

e_x is the embedding of token x, p_i that of position i, H^l what layer l returns. Shapes:
    B   rows of a batch                d   dimensions
    n   tokens of a row                m   tokens that the encoder reads: in MAE-LM n - k
    k   of them masked (paper: m)      V   tokens in the vocabulary
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLS, PAD, SEP, MASK, NUM_SPECIAL = range(5)  # the first token ids; bytes follow, then merges


# ---- 1. Configuration: section 4.1 -------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """What is computed; by default, base."""
    vocab_size: int = 32768  # V, special tokens and bytes included
    seq_len: int = 512  # n
    encoder_layers: int = 12  # L
    encoder_dim: int = 768  # d
    encoder_heads: int = 12  # of d / heads dimensions each, in the decoder, too
    decoder_layers: int = 4  # 0: the encoder predicts, as in standard MLM
    dropout: float = 0.1  # of the encoder; the decoder has none (App. C)
    rel_pos_buckets: int = 32  # groups of distances between tokens; 0: no relative positions
    rel_pos_max_distance: int = 128  # from here on, all share the last group of their side
    mask_rate: float = 0.15  # share of a row that is masked
    # For small presets (bench/results/presets.md):
    norm: str = "post"  # post | pre: LayerNorm after or before sub-layers
    init_std: float = 0.02  # of initial weights
    decoder_relative: bool = False  # relative positions in the decoder, too
    # For Table 2 (ABLATIONS) and Figure 4:
    mask_in_encoder: float = 0.0  # delta of Figure 4, 0 to 1: share of masks that the encoder reads
    encoder_fill: str = "mask"  # mask | random: what it reads there
    decoder_reset: bool = False  # the decoder reads e_[MASK] even there
    aligned_positions: bool = True  # in the encoder, tokens keep their positions; else 0 to m - 1
    decoder_dim: int = 0  # 0: encoder_dim
    decoder: str = "bi"  # bi | bi+cross | uni+cross | cross; all but bi: support/cross_attention.py

    def masks_per_row(self, n):
        return round(self.mask_rate * n)  # k

    @property
    def decoder_width(self):
        return self.decoder_dim if self.decoder_dim > 0 else self.encoder_dim


# ---- 2. Removing the masked positions: section 3, App. C ---------------------------------------------------
class Corruption(NamedTuple):
    """What the model sees of a batch. k is the same in every row, so (B, m) has no gaps."""
    masked: Tensor  # (B, n) bool, the set M
    kept: Tensor  # (B, m) int64, positions that the encoder reads, ascending
    read: Tensor  # (B, m) int64, the tokens that it reads there


def corrupt(tokens, config, generator):
    """Mask tokens (B, n) int64 that are not special, and remove them -> Corruption."""
    k = config.masks_per_row(tokens.shape[1])
    chosen = draw_masks(tokens >= NUM_SPECIAL, k, generator)
    return remove_masks(tokens, chosen, config, generator)


def draw_masks(maskable, k, generator):
    """k random positions of each row where maskable (B, n) is True -> (B, k) int64. ValueError if too few."""
    fewest = int(maskable.sum(1).min())
    if not 0 < k <= fewest:
        raise ValueError(f"cannot mask {k} tokens of each row: use 1 to {fewest}")
    # Each position draws a number; the k smallest are masked. topk sorts by number: any slice is random, too.
    number = torch.rand(maskable.shape, generator=generator, device=maskable.device)
    number = number.masked_fill(~maskable, 2.0)  # above all others
    return number.topk(k, largest=False).indices


def remove_masks(tokens, chosen, config, generator):
    """Mask tokens (B, n) int64 at the positions chosen (B, k) int64 -> Corruption."""
    n, k = tokens.shape[1], chosen.shape[1]
    shown = round(config.mask_in_encoder * k)  # the encoder reads so many masks: 0 in MAE-LM
    nowhere = torch.zeros_like(tokens, dtype=torch.bool)
    masked = nowhere.scatter(1, chosen, True)
    removed = nowhere.scatter(1, chosen[:, shown:], True)
    kept = (~removed).nonzero()[:, 1].view(len(tokens), n - k + shown)  # row after row: (B, m)

    # At masks that stay, the encoder reads [MASK] (always, unlike BERT) or a random token.
    fill = torch.full_like(tokens, MASK)
    if config.encoder_fill == "random":
        fill.random_(NUM_SPECIAL, config.vocab_size, generator=generator)
    read = torch.where(masked, fill, tokens).gather(1, kept)
    return Corruption(masked, kept, read)


# ---- 3. Transformer layers: section 2.1 --------------------------------------------------------------------
def attention(q, k, v, bias=None, p=0.0):
    """Softmax(Q K^T / sqrt(d_h) + bias) V, with dropout p on the softmax. q (B, heads, n, d_h), k and v (B,
    heads, m, d_h), bias that fits (B, heads, n, m) -> (B, heads, n, d_h)."""
    if q.is_cuda:
        # One fused kernel; on a CPU the formula below is faster.
        bias = bias.to(q.dtype) if bias is not None else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
    d_h = q.shape[-1]
    logits = (q * d_h ** -0.5) @ k.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias
    weights = logits.float().softmax(dim=-1).to(q.dtype)
    return F.dropout(weights, p) @ v


class RelativeBias(nn.Module):
    """A number for each head and group of distances ("bucket"), added to attention's logits; section 4.1."""
    def __init__(self, config, heads):
        super().__init__()
        self.table = nn.Embedding(config.rel_pos_buckets, heads)
        distance = torch.arange(1 - config.seq_len, config.seq_len)  # all there are: 2n - 1
        bucket = relative_bucket(distance, config.rel_pos_buckets, config.rel_pos_max_distance)
        self.register_buffer("bucket", bucket, persistent=False)

    def forward(self, positions):
        """positions (B, m) int64 -> (B, heads, m, m)."""
        values = self.table(self.bucket)  # (2n - 1, heads)
        distance = positions[:, None, :] - positions[:, :, None]  # key minus query: (B, m, m)
        index = distance + len(values) // 2  # distance 0 is in the middle
        return gather_bias(values, index)  # values[index], heads in front


class Attention(nn.Module):
    """MHSA of section 2.1: head_h = Attn(X W_h^Q, X W_h^K, X W_h^V), Concat(head_1 ... head_N) W^O."""
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.p = heads, dropout
        self.query = nn.Linear(dim, dim)  # of all heads: W^Q = [W_1^Q ... W_N^Q]
        self.key_value = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x, bias=None):
        """x (B, n, d) -> (B, n, d)."""
        q = self.query(x)
        k, v = self.key_value(x).chunk(2, dim=-1)
        q, k, v = [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v)]  # (B, heads, n, d_h)
        z = attention(q, k, v, bias, self.p if self.training else 0.0)
        return self.output(z.transpose(1, 2).flatten(2))  # the heads side by side: (B, n, d)


class Residual(nn.Module):
    """A sub-layer f with its skip connection: LayerNorm(x + f(x)), or for pre x + f(LayerNorm(x))."""
    def __init__(self, config, dim, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.pre, self.p = config.norm == "pre", dropout

    def forward(self, x, f):
        if self.pre:
            return x + F.dropout(f(self.norm(x)), self.p, self.training)
        fx = F.dropout(f(x), self.p, self.training)
        return self.norm(x + fx).to(fx.dtype)  # float32 under autocast


class Block(nn.Module):
    """A Transformer layer: self-attention, then a feed-forward network (FFN)."""
    def __init__(self, config, dim, heads, dropout):
        super().__init__()
        self.self_attention = Attention(dim, heads, dropout)
        self.self_residual = Residual(config, dim, dropout)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.ffn_residual = Residual(config, dim, dropout)

    def forward(self, x, bias=None, at=None):
        """x (B, n, d) -> (B, n, d), or at the positions `at` (B, k) int64 only: (B, k, d)."""
        x = self.self_residual(x, lambda y: self.self_attention(y, bias))
        if at is not None:  # all query in attention; only these enter the FFN
            row = torch.arange(len(at), device=at.device)[:, None]
            x = x[row, at]
        return self.ffn_residual(x, self.ffn)


class Stack(nn.Module):
    """Layers 1 to L, which share a RelativeBias."""
    def __init__(self, config, dim, layers, dropout, relative):
        super().__init__()
        heads = dim * config.encoder_heads // config.encoder_dim
        has_bias = relative and config.rel_pos_buckets > 0
        self.relative_bias = RelativeBias(config, heads) if has_bias else None
        self.blocks = nn.ModuleList([Block(config, dim, heads, dropout) for _ in range(layers)])
        # Post-LN layers end with a LayerNorm already.
        self.final_norm = nn.LayerNorm(dim) if config.norm == "pre" else nn.Identity()

    def forward(self, x, positions, padding=None, at=None):
        """H^0, x (B, n, d) -> [H^0, ..., H^L], of H^L only the positions `at` (B, k)."""
        bias = attention_bias(self.relative_bias, positions, padding)  # fits (B, heads, n, n); or None
        *lower, last = self.blocks
        states = [x]
        for block in lower:
            states.append(block(states[-1], bias))
        x = last(states[-1], bias, at)
        return [*states, self.final_norm(x)]


# ---- 4. Encoder: section 3 ---------------------------------------------------------------------------------
class Encoder(nn.Module):
    """What is kept after pre-training."""
    def __init__(self, config):
        super().__init__()
        d = config.encoder_dim
        self.token_embedding = nn.Embedding(config.vocab_size, d)
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = nn.LayerNorm(d)
        self.p = config.dropout
        self.stack = Stack(config, d, config.encoder_layers, config.dropout, relative=True)

    def forward(self, tokens, positions, padding=None, all_layers=False, at=None):
        """tokens, positions (B, m) int64 -> H^L (B, m, d), or at indices `at` of the m: (B, k, d). For
        fine-tuning, padding (B, m) bool hides tokens; for analysis, all_layers returns [H^0, ..., H^L]."""
        h = self.token_embedding(tokens) + self.position_embedding(positions)  # h_i^0 = e_{x_i} + p_i
        # Differs from the paper: its formula has no LayerNorm; its code has.
        h = F.dropout(self.norm(h), self.p, self.training)
        states = self.stack(h, positions, padding, at)
        return states if all_layers else states[-1]


# ---- 5. Decoder: section 3 ---------------------------------------------------------------------------------
class Decoder(nn.Module):
    """A shallow stack over all n positions, for pre-training only."""
    def __init__(self, config):
        super().__init__()
        d = config.decoder_width
        self.project = nn.Linear(config.encoder_dim, d) if config.encoder_dim != d else nn.Identity()
        # Differs from the paper: it has one p_i, no LayerNorm; in its code the decoder has its own.
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = nn.LayerNorm(d)
        self.stack = Stack(config, d, config.decoder_layers, 0.0, config.decoder_relative)

    def forward(self, x, positions, padding=None, at=None):
        """x (B, n, d) of decoder_input -> (B, n, decoder_width), or at the positions `at` (B, k)."""
        x = self.project(x) + self.position_embedding(positions)  # h-hat_i^0
        return self.stack(self.norm(x), positions, padding, at)[-1]


# ---- 6. The model and its loss: Eq. (1) --------------------------------------------------------------------
class Head(nn.Module):
    """Logits e_x^T h of all tokens x; Eq. (1)."""
    def __init__(self, config):
        super().__init__()
        d = config.encoder_dim
        # Differs from the paper: Eq. (1) has e_x^T h_i; its code transforms h_i first.
        self.transform = nn.Sequential(nn.Linear(config.decoder_width, d), nn.GELU(), nn.LayerNorm(d))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, h, embeddings):
        """h (B, k, decoder_width) and the encoder's embeddings (V, d), e -> (B, k, V)."""
        return F.linear(self.transform(h), embeddings, self.bias)


class MAELM(nn.Module):
    """The masked autoencoder; without a decoder, a standard MLM."""
    def __init__(self, config):
        super().__init__()
        if config.decoder != "bi":
            raise ValueError(f"decoder={config.decoder!r}: use support.models.make_model")
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config) if config.decoder_layers > 0 else None
        self.head = Head(config)
        self.init_parameters()

    def init_parameters(self):
        """Matrices and embeddings N(0, init_std), biases 0; LayerNorms have gains of 1."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=self.config.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, corruption):
        """tokens (B, n) int64 -> the mean of -log p(x_i | x-hat) over i in M, in nats; Eq. (1)."""
        # The positions of the k ones among zeros and ones, in any order.
        k = self.config.masks_per_row(tokens.shape[1])
        at = corruption.masked.int().topk(k).indices  # (B, k)
        logits = self.logits(corruption, at)
        # Differs from the paper: Eq. (1) is a sum; here, as in its code, a mean.
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.gather(1, at).flatten())

    def logits(self, corruption, at):
        """Predictions (B, k, V) at the positions `at` (B, k) int64."""
        if self.decoder is None:  # standard MLM
            z = self.encode(corruption, at)  # (B, k, d)
        else:
            h = self.encode(corruption)  # H^L (B, m, d)
            x = self.decoder_input(h, corruption)  # (B, n, d)
            positions = torch.arange(x.shape[1], device=x.device)[None]  # (1, n)
            z = self.decoder(x, positions, at=at)  # (B, k, decoder_width)
        return self.head(z, self.encoder.token_embedding.weight)

    def encode(self, corruption, at=None):
        """H^L (B, m, d) of what is kept; in standard MLM, m = n, `at` selects positions: (B, k, d)."""
        masked, kept, read = corruption
        n, m = masked.shape[1], kept.shape[1]
        positions = kept
        if m == n or not self.config.aligned_positions:
            # If m = n, `kept` is the same in every row: one row, one bias.
            positions = torch.arange(m, device=kept.device)[None]  # (1, m)
        return self.encoder(read, positions, at=at)

    def decoder_input(self, h, corruption):
        """Fill the gaps: h_i^L, h (B, m, d), at kept positions, e_[MASK] elsewhere -> (B, n, d)."""
        B, n = corruption.masked.shape
        e_mask = self.encoder.token_embedding.weight[MASK].to(h.dtype)  # (d,)
        row = torch.arange(B, device=h.device)[:, None]
        x = e_mask.expand(B, n, -1).index_put((row, corruption.kept), h)  # x[row, kept] = h
        if self.config.decoder_reset:  # forget what the encoder made of [MASK]
            x = torch.where(corruption.masked[:, :, None], e_mask, x)
        return x


# ---- 7. Details --------------------------------------------------------------------------------------------
def relative_bucket(distance, num_buckets, max_distance):
    """T5's bucket (Raffel et al., 2019) of a distance, key minus query, int64 -> int64: in the upper half for
    keys to the right; near distances have one each, far ones share."""
    # The paper's text cites T5. Its code has another formula.
    half = num_buckets // 2
    exact = half // 2  # sizes below this have their own bucket
    size = distance.abs()
    # In equal steps of the logarithm from `exact` to max_distance; 1e-9, lest rounding turn 3 into 2.
    way = (size.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact)
    far = exact + ((half - exact) * way + 1e-9).long()
    far = far.clamp(max=half - 1)  # the last bucket has no limit
    bucket = torch.where(size < exact, size, far)
    return torch.where(distance > 0, half + bucket, bucket)


def gather_bias(values, index):
    """values[index].permute(0, 3, 1, 2), only faster: values (2n - 1, heads), index (B, m, m)."""
    B, m, _ = index.shape
    heads = values.shape[1]
    flat = index.view(B, 1, m * m).expand(-1, heads, -1)
    return values.t().expand(B, -1, -1).gather(2, flat).view(B, heads, m, m)


def attention_bias(relative_bias, positions, padding):
    """relative_bias(positions), and -inf where a key is padding (B, m); None without both."""
    bias = relative_bias(positions) if relative_bias is not None else None
    if padding is not None:
        hidden = torch.zeros(padding.shape, device=padding.device).masked_fill(padding, -torch.inf)
        hidden = hidden[:, None, None, :]  # (B, 1, 1, m)
        bias = bias + hidden if bias is not None else hidden
    if bias is not None and bias.is_cuda:
        # Kernels want autocast's dtype, and rows that begin at multiples of 8 numbers.
        if torch.is_autocast_enabled("cuda"):
            bias = bias.to(torch.get_autocast_dtype("cuda"))
        m = bias.shape[-1]
        bias = F.pad(bias, (0, -m % 8))[..., :m]
    return bias


ABLATIONS = {  # Table 2, as differences from MAE-LM
    "mae-lm": dict(),
    "mlm": dict(mask_in_encoder=1.0, decoder_layers=0),
    "enc-mask": dict(mask_in_encoder=1.0),
    "enc-mask-dec-resets": dict(mask_in_encoder=1.0, decoder_reset=True),
    "random-replace": dict(mask_in_encoder=1.0, encoder_fill="random"),
    "misaligned": dict(aligned_positions=False),
    "no-relative": dict(rel_pos_buckets=0),
    "bi+cross": dict(decoder="bi+cross"),
    "uni+cross": dict(decoder="uni+cross"),
    "cross": dict(decoder="cross"),
    "dec-2": dict(decoder_layers=2),
    "dec-6": dict(decoder_layers=6),
    "dec-512": dict(decoder_dim=512),
    "dec-1024": dict(decoder_dim=1024),
}
