"""MAE-LM: "Representation Deficiency in Masked Language Modeling" (Meng et al., ICLR 2024). A masked language
model (MLM) spends dimensions of its encoder on [MASK], which no downstream text contains (section 2). MAE-LM
removes the masked positions M from the encoder; a shallow decoder predicts them (section 3). M = {2, 5}:

    x       the   cat   sat   on    the   mat
             |     |           |     |
          [      encoder, L layers        ]       sees only real tokens, each at its own position
             |     |           |     |
            h_0   h_1         h_3   h_4           H^L; e_[MASK] fills the gaps before the decoder
          [      decoder, 4 layers        ]       discarded after pre-training, like the head
                         |                 |
                        sat               mat     predicted at masked positions only

Letters, mostly the paper's, with the values of its base model:
    B   sequences in a batch                        d     dimensions of the encoder (768); d_h per head (64)
    n   tokens in a sequence (512)                  V     tokens in the vocabulary (32,768)
    m   masked positions in a sequence (77)         e_x   embedding of token x
    r   tokens that the encoder sees, n - m (435)   p_i   embedding of position i
    t   tokens that a layer sees, r or n            H^l   output of layer l; H^0 is the input of layer 1
"""
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLS, PAD, SEP, MASK = range(4)  # ids of the special tokens
NUM_SPECIAL = 4  # bytes and merges follow


# ---- 1. Configuration: section 4.1 -------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Hyperparameters. The defaults are the paper's base model. A field's comment is also its help in -h."""
    vocab_size: int = 32768  # V, the vocabulary with special tokens and bytes
    seq_len: int = 512  # n, tokens per sequence
    encoder_layers: int = 12  # L, layers of the encoder
    encoder_dim: int = 768  # d, dimensions
    encoder_heads: int = 12  # attention heads, of size d / heads each; the decoder's have the same size
    decoder_layers: int = 4  # layers of the decoder; 0 in a standard MLM
    dropout: float = 0.1  # in the encoder; the decoder has none (App. C)
    rel_pos_buckets: int = 32  # groups of distances between tokens; 0 for no relative positions
    rel_pos_max_distance: int = 128  # larger distances share one group on each side
    mask_rate: float = 0.15  # fraction of the tokens to mask
    # For small presets:
    norm: Literal["post", "pre"] = "post"  # LayerNorm after or before the sub-layers
    init_std: float = 0.02  # standard deviation of the initial weights
    decoder_relative: bool = False  # whether the decoder also has relative positions
    # For Table 2 and Figure 4; skip these until ABLATIONS:
    mask_in_encoder: float = 0.0  # delta in Figure 4: fraction of the masked positions that the encoder sees
    encoder_fill: Literal["mask", "random"] = "mask"  # the token that the encoder sees at masked positions
    decoder_reset: bool = False  # whether e_[MASK] replaces the encoder's output at masked positions
    aligned_positions: bool = True  # whether tokens keep their positions in the encoder, or get 0 to r - 1
    decoder_dim: int = 0  # dimensions of the decoder; 0 for encoder_dim
    decoder: str = "bi"  # bi for Decoder in maelm.py; bi+cross, uni+cross or cross for Table 2

    def num_masked(self, n):  # m for n tokens
        return round(self.mask_rate * n)

    @property
    def decoder_width(self):
        return self.decoder_dim or self.encoder_dim


# ---- 2. Masking: section 3, App. C -------------------------------------------------------------------------
class Corruption(NamedTuple):
    """The masked text and its positions. All sequences have the same m and r, so no padding is needed."""
    corrupted: Tensor  # (B, n) int64, x-hat
    masked: Tensor  # (B, m) int64, the masked positions M, in random order
    kept: Tensor  # (B, r) int64, the positions that the encoder sees, ascending

    @property
    def is_complete(self):  # as in an MLM, whose sequences all have the positions 0 to n - 1
        return self.kept.shape == self.corrupted.shape


def corrupt(tokens, config, generator):
    """Mask a fraction mask_rate of the tokens (B, n) int64, but never a special token -> Corruption."""
    m = config.num_masked(tokens.shape[1])
    masked = draw_masks(tokens >= NUM_SPECIAL, m, generator)
    return apply_masks(tokens, masked, config, generator)


def draw_masks(maskable, m, generator):
    """Draw m positions per sequence where maskable (B, n) bool is True -> (B, m) int64, or ValueError."""
    fewest = int(maskable.sum(dim=1).min())
    if not 0 < m <= fewest:
        raise ValueError(f"cannot mask {m} tokens of each sequence: use 1 to {fewest}")
    number = torch.rand(maskable.shape, generator=generator, device=maskable.device)  # in [0, 1)
    number = number.masked_fill(~maskable, 2.0)  # never one of the m smallest
    return number.topk(m, largest=False).indices  # in random order


def apply_masks(tokens, masked, config, generator):
    """Mask tokens (B, n) int64 at the distinct positions `masked` (B, m) int64 -> Corruption, or ValueError.
    Example for MAE-LM: tokens 10 11 12 13 10 14, masked 5 2 -> corrupted 10 11 3 13 10 3, kept 0 1 3 4.
    With mask_in_encoder = 0.5, the encoder also sees the [MASK] at position 5: kept 0 1 3 4 5."""
    B, m = masked.shape
    is_masked = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, masked, True)
    if m == 0 or is_masked.sum() != B * m:
        raise ValueError("each sequence needs one or more masked positions, all distinct")
    replacement = torch.full_like(masked, MASK)  # at every masked position, unlike in BERT
    if config.encoder_fill == "random":
        replacement.random_(NUM_SPECIAL, config.vocab_size, generator=generator)
    corrupted = tokens.scatter(1, masked, replacement)
    seen_masks = masked[:, :round(config.mask_in_encoder * m)]  # a random part: draw_masks shuffles them
    is_removed = is_masked.scatter(1, seen_masks, False)
    kept = (~is_removed).nonzero()[:, 1].view(B, -1)  # ascending; r per sequence
    return Corruption(corrupted, masked, kept)


# ---- 3. Transformer layers: section 2.1 --------------------------------------------------------------------
def attention(q, k, v, bias=None, p=0.0):
    """Softmax(Q K^T / sqrt(d_h) + bias) V, with dropout p on the softmax. q (B, heads, t, d_h); k and v for s
    keys, (B, heads, s, d_h); bias broadcastable to (B, heads, t, s) -> (B, heads, t, d_h)."""
    if q.is_cuda:  # the same formula in one kernel; on a CPU, the lines below are faster
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
    d_h = q.shape[-1]
    logits = (q * d_h ** -0.5) @ k.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias
    weights = logits.float().softmax(dim=-1).to(q.dtype)
    return F.dropout(weights, p) @ v


class Attention(nn.Module):
    """MHSA of section 2.1: head_h = Attn(X W_h^Q, X W_h^K, X W_h^V), Concat(head_1 ... head_N) W^O."""
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.p = dropout
        self.query = nn.Linear(dim, dim)  # for all heads: W^Q = [W_1^Q ... W_N^Q]
        self.key_value = nn.Linear(dim, 2 * dim)  # separate from query, for cross-attention
        self.output = nn.Linear(dim, dim)

    def forward(self, x, bias=None, memory=None):
        """x (B, t, d) -> (B, t, d). Keys and values come from x or, in cross-attention, memory (B, s, d)."""
        q = self.query(x)
        source = x if memory is None else memory
        k, v = self.key_value(source).chunk(2, dim=-1)
        q, k, v = [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v)]  # (B, heads, t, d_h)
        z = attention(q, k, v, bias, self.p if self.training else 0.0)
        return self.output(z.transpose(1, 2).flatten(2))  # the heads side by side: (B, t, d)


class Block(nn.Module):
    """A Transformer layer: self-attention, then a feed-forward network (FFN)."""
    def __init__(self, config, dim, heads, dropout):  # dim: d, or the decoder's width
        super().__init__()
        self.post_norm = config.norm == "post"
        self.self_attention = Attention(dim, heads, dropout)
        self.attention_norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.ffn_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias=None, at=None):
        """x (B, t, d) -> (B, t, d) or, if only the outputs at indices `at` (B, m) are needed, (B, m, d)."""
        x = self.sublayer(x, self.self_attention, self.attention_norm, bias)
        if at is not None:  # the FFN treats each token alone, so it can skip the others
            x = x.take_along_dim(at[:, :, None], dim=1)
        return self.sublayer(x, self.ffn, self.ffn_norm)

    def sublayer(self, x, module, norm, *arguments):
        """A submodule with its dropout, skip connection and LayerNorm: last, as in BERT, or first. Attention
        has more arguments, bias and memory."""
        if self.post_norm:
            y = self.dropout(module(x, *arguments))
            return norm(x + y).to(y.dtype)  # bf16 in autocast, whose LayerNorm gives float32
        return x + self.dropout(module(norm(x), *arguments))


class RelativeBias(nn.Module):
    """A learned number per head and distance bucket, added to the attention logits; section 4.1."""
    def __init__(self, config, heads):
        super().__init__()
        self.table = nn.Embedding(config.rel_pos_buckets, heads)
        distance = torch.arange(1 - config.seq_len, config.seq_len)  # all 2n - 1 distances
        bucket = relative_bucket(distance, config.rel_pos_buckets, config.rel_pos_max_distance)
        self.register_buffer("bucket", bucket, persistent=False)

    def forward(self, positions):
        """positions (B, t) int64, or (1, t) if all sequences share them -> (B or 1, heads, t, t)."""
        values = self.table(self.bucket)  # one per distance and head: (2n - 1, heads)
        distance = positions[:, None, :] - positions[:, :, None]  # key minus query: (B, t, t)
        index = distance + len(values) // 2  # distance 0 is in the middle of values, at n - 1
        return lookup(values, index)  # values[index], as (B, heads, t, t)


class Stack(nn.Module):
    """Transformer layers 1 to L, which share one RelativeBias. Pre-LN ends with a LayerNorm."""
    def __init__(self, config, dim, layers, dropout, relative, block=Block):
        super().__init__()
        head_dim = config.encoder_dim // config.encoder_heads  # d_h
        heads = dim // head_dim  # fewer in a narrower decoder
        self.relative_bias = RelativeBias(config, heads) if relative and config.rel_pos_buckets > 0 else None
        self.blocks = nn.ModuleList([block(config, dim, heads, dropout) for _ in range(layers)])
        self.final_norm = nn.Identity() if config.norm == "post" else nn.LayerNorm(dim)

    def forward(self, x, positions, padding=None, at=None):
        """x = H^0 (B, t, d), positions (B or 1, t) -> [H^0, ..., H^L]. With `at`, H^L is (B, m, d)."""
        bias = self.attention_bias(positions, padding)
        states = [x]
        for block in self.blocks[:-1]:
            states.append(block(states[-1], bias))
        # For speed, layer L can end at M only, because the loss needs no other position.
        x = self.blocks[-1](states[-1], bias, at)
        return [*states, self.final_norm(x)]

    def attention_bias(self, positions, padding=None):
        """The relative bias plus -inf at padded keys, broadcastable to (B, heads, t, t); or None."""
        bias = self.relative_bias(positions) if self.relative_bias is not None else None
        if padding is not None:
            key_bias = torch.where(padding, -torch.inf, 0.0)[:, None, None, :]  # (B, 1, 1, t)
            key_bias = key_bias.to(self.blocks[0].attention_norm.weight.dtype)  # bf16 if the model is
            bias = key_bias if bias is None else bias + key_bias
        return align_for_cuda(bias)


# ---- 4. Encoder: section 3 ---------------------------------------------------------------------------------
class Encoder(nn.Module):
    """The part that is kept after pre-training."""
    def __init__(self, config):
        super().__init__()
        d = config.encoder_dim
        self.token_embedding = nn.Embedding(config.vocab_size, d)
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(config.dropout)
        self.stack = Stack(config, d, config.encoder_layers, config.dropout, relative=True)

    def forward(self, tokens, positions, padding=None, at=None):
        return self.hidden_states(tokens, positions, padding, at)[-1]  # H^L (B, r, d), or (B, m, d) at `at`

    def hidden_states(self, tokens, positions, padding=None, at=None):
        """tokens, positions (B, r) int64 -> [H^0, ..., H^L], as in Stack. In fine-tuning, padding (B, r) bool
        hides keys."""
        h = self.token_embedding(tokens) + self.position_embedding(positions)  # h_i^0 = e_{x_i} + p_i
        # Differs from the paper: the formula has no LayerNorm here; the authors' code has one.
        h = self.dropout(self.norm(h))
        return self.stack(h, positions, padding, at)


# ---- 5. Decoder: section 3 ---------------------------------------------------------------------------------
class Decoder(nn.Module):
    """A shallow stack over all n positions, used in pre-training only. Table 2 also has other blocks."""
    def __init__(self, config, block=Block):
        super().__init__()
        width = config.decoder_width
        self.project = nn.Linear(config.encoder_dim, width) if config.encoder_dim != width else nn.Identity()
        # Differs from the paper: these p_i are the decoder's own, and a LayerNorm follows (authors' code).
        self.position_embedding = nn.Embedding(config.seq_len, width)
        self.norm = nn.LayerNorm(width)
        self.stack = Stack(config, width, config.decoder_layers, 0.0, config.decoder_relative, block)

    def forward(self, x, positions, padding=None, at=None):
        """x (B, n, d), its gaps filled -> (B, n, decoder_width), or (B, m, decoder_width) at `at`."""
        h = self.project(x) + self.position_embedding(positions)  # h-hat_i^0; e_[MASK] is also projected
        return self.stack(self.norm(h), positions, padding, at)[-1]


# ---- 6. The model and its loss: Eq. (1) --------------------------------------------------------------------
class Head(nn.Module):
    """The logits e_x^T h of Eq. (1), for all tokens x."""
    def __init__(self, config):
        super().__init__()
        d = config.encoder_dim
        # Differs from the paper: Eq. (1) has e_x^T h_i; the authors' code transforms h_i and adds a bias.
        self.transform = nn.Sequential(nn.Linear(config.decoder_width, d), nn.GELU(), nn.LayerNorm(d))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, h, embeddings):
        """h (B, m, decoder_width) and the encoder's token embeddings (V, d) -> (B, m, V)."""
        return F.linear(self.transform(h), embeddings, self.bias)


class MAELM(nn.Module):
    """The masked autoencoder or, without a decoder, a standard MLM."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config) if config.decoder_layers > 0 else None
        self.head = Head(config)
        self.init_parameters()

    def init_parameters(self):
        """Draw matrices and embeddings from N(0, init_std^2). Biases start at 0, and LayerNorm gains at 1."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=self.config.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, corruption):
        """The true tokens (B, n) int64 -> the mean of -log p(x_i | x-hat) over i in M, in nats; Eq. (1)."""
        logits = self.logits(corruption)  # (B, m, V)
        targets = tokens.gather(1, corruption.masked)  # (B, m)
        # Differs from the paper: Eq. (1) is a sum; the authors' code takes the mean.
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def logits(self, corruption):
        """Predictions at the masked positions, (B, m, V)."""
        if self.decoder is None:  # a standard MLM
            h = self.encode(corruption, at=corruption.masked)  # (B, m, d)
        else:
            h = self.encode(corruption)  # H^L, (B, r, d)
            h = self.decode(h, corruption)  # (B, m, decoder_width)
        return self.head(h, self.encoder.token_embedding.weight)

    def encode(self, corruption, at=None):
        """H^L (B, r, d) at the kept positions; in a standard MLM (r = n), (B, m, d) at the positions `at`."""
        seen = corruption.corrupted.gather(1, corruption.kept)  # (B, r)
        if not self.config.aligned_positions:  # Table 2: misaligned
            positions = torch.arange(seen.shape[1], device=seen.device)[None]
        elif corruption.is_complete:  # all sequences have the same positions, and one copy saves time
            positions = corruption.kept[:1]
        else:  # as in MAE-LM
            positions = corruption.kept
        return self.encoder(seen, positions, at=at)

    def decode(self, h, corruption):
        """h = H^L (B, r, d) -> the decoder's output at the masked positions, (B, m, decoder_width)."""
        x = self.fill_gaps(h, corruption)  # (B, n, d)
        positions = torch.arange(x.shape[1], device=x.device)[None]  # (1, n)
        return self.decoder(x, positions, at=corruption.masked)

    def fill_gaps(self, h, corruption):
        """Put h = H^L (B, r, d) at the kept positions and e_[MASK] at all others -> (B, n, d)."""
        B, n = corruption.corrupted.shape
        row = torch.arange(B, device=h.device)[:, None]  # (B, 1)
        e_mask = self.encoder.token_embedding.weight[MASK].to(h.dtype)  # (d,)
        x = e_mask.expand(B, n, -1).clone()
        x[row, corruption.kept] = h
        if self.config.decoder_reset:  # Table 2: discard the encoder's output at masked positions
            x[row, corruption.masked] = e_mask
        return x


ABLATIONS = {  # the rows of Table 2, as differences from MAE-LM
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


# ---- 7. Details: T5's buckets, and speed-ups that change no result -----------------------------------------
def relative_bucket(distance, num_buckets, max_distance):
    """T5's bucket (Raffel et al., 2019) of each distance, key minus query, int64 -> int64. With 32 buckets
    up to distance 128, the distances -200 -9 -1 0 1 9 fall into the buckets 15 8 1 0 17 24."""
    # Differs from the authors' code, whose buckets are not T5's.
    half = num_buckets // 2  # keys to the right of the query get the upper half
    max_exact = half // 2  # distances below this have buckets of their own
    size = distance.abs()
    # A log scale: 0 at max_exact, 1 at max_distance.
    fraction = (size.clamp(min=max_exact).double() / max_exact).log() / math.log(max_distance / max_exact)
    far = max_exact + ((half - max_exact) * fraction + 1e-9).long()  # 1e-9 corrects rounding errors
    far = far.clamp(max=half - 1)  # the last bucket is open-ended
    bucket = torch.where(size < max_exact, size, far)
    return torch.where(distance > 0, half + bucket, bucket)


def lookup(values, index):
    """values (2n - 1, heads), index (B, t, t) -> values[index].permute(0, 3, 1, 2), but faster."""
    B, t, _ = index.shape
    flat = index.view(B, 1, t * t).expand(-1, values.shape[1], -1)  # (B, heads, t * t)
    return values.t().expand(B, -1, -1).gather(2, flat).unflatten(2, (t, t))


def align_for_cuda(bias):
    """The same bias in the dtype and memory layout that CUDA's attention kernels need."""
    if bias is None or not bias.is_cuda:
        return bias
    if torch.is_autocast_enabled("cuda"):
        bias = bias.to(torch.get_autocast_dtype("cuda"))
    t = bias.shape[-1]
    return F.pad(bias, (0, -t % 8))[..., :t]  # each row starts at a multiple of 8 elements
