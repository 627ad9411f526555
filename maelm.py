"""MAE-LM: masked autoencoders for language (Meng et al., "Representation Deficiency in Masked Language Modeling").

A masked language model spends model dimensions on [MASK], a token that no downstream text contains, so the
representations of real tokens are rank-deficient (section 2). MAE-LM takes the masked positions out of the
encoder, lets a shallow decoder predict them, and keeps only the encoder (section 3). Figure 2, with M = {2, 5}:

    x      the   cat   sat   on    the   mat
            |     |           |     |
         [       encoder, L layers       ]       reads real tokens only, at their original positions
            |     |           |     |
           h_0   h_1 [MASK]  h_3   h_4 [MASK]    e_[MASK] fills the gaps, then + p_i
         [       decoder, 4 layers       ]       thrown away after pre-training
                       |                 |
                      sat               mat      predicted at the masked positions only

    symbol           name here                               shape
    x, x-hat         tokens, Corruption.tokens               (B, n), (B, m) int64
    M, i not in M    Corruption.masked, .kept                (B, n) bool, k True a row; (B, m) int64, ascending
    e_x, p_i         token_embedding, position_embedding     (V, d), (n, d)
    H^l, H-hat^0     h, states; x in Decoder.forward         (B, m, d), (B, n, d)

    equation                                                 function
    2.1  Attn(Q, K, V) = Softmax(Q K^T / sqrt(d_h)) V        attention; MHSA: Attention.forward
    3    h_i^0 = e_{x_i} + p_i for i not in M                corrupt, Encoder.forward
    3    h-hat_i^0 = e_[MASK] + p_i or h_i^L + p_i           MAELM.decoder_input, Decoder.forward
    (1)  mean of -log p(x_i | x-hat) over i in M             Head.forward, MAELM.forward

The shapes of the figure (`python -m doctest maelm.py` runs them):

    >>> x = torch.tensor([[10, 11, 12, 13, 10, 14]])  # the cat sat on the mat
    >>> config = Config(vocab_size=300, seq_len=6, encoder_dim=8, encoder_heads=2, mask_rate=1 / 3)
    >>> c, model = corrupt(x, config, torch.Generator().manual_seed(24)), MAELM(config)
    >>> c.masked.int().tolist(), c.kept.tolist(), c.tokens.tolist()
    ([[0, 0, 1, 0, 0, 1]], [[0, 1, 3, 4]], [[10, 11, 13, 10]])
    >>> h, at = model.encode(c), model.predicted(c.masked)
    >>> [tuple(z.shape) for z in (h, model.decoder_input(h, c), model.logits(x, c, at), model(x, c))]
    [(1, 4, 8), (1, 6, 8), (1, 2, 300), ()]
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CLS, PAD, SEP, MASK, NUM_SPECIAL = range(5)  # the first token ids; bytes and merges follow


# ---- 1. Configuration: section 4.1, Tables 2 and 4 ----------------------------------------------------------
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
    mask_rate: float = 0.15  # share of a row that is predicted
    mask_in_encoder: float = 0.0  # delta of Figure 4: share of masked positions that the encoder reads
    encoder_fill: str = "mask"  # mask | random: the token that it reads there
    bert_trick: bool = False  # of those, 10 % random and 10 % unchanged (footnote 1)
    decoder_reset: bool = False  # decoder reads e_[MASK], not h_i, at every masked position
    aligned_positions: bool = True  # encoder positions skip the removed tokens
    rel_pos_buckets: int = 32  # of the encoder's relative positions; 0 = none
    rel_pos_max_distance: int = 128  # all distances from here on share a bucket
    decoder_layers: int = 4  # 0 = none: the encoder predicts
    decoder_dim: int = 0  # 0 = encoder_dim
    decoder_self: str = "bi"  # bi | uni | none: the decoder's self-attention
    decoder_cross: bool = False  # attention to the encoder's output

    def __post_init__(self):
        if self.decoder_dim == 0:
            object.__setattr__(self, "decoder_dim", self.encoder_dim)
        for rule in (  # each about the field that it names first
            "vocab_size > 260", "seq_len > 1", "encoder_layers > 0", "norm in ('post', 'pre')", "init_std > 0",
            "encoder_heads > 0 and encoder_dim % encoder_heads == 0", "position_init in ('normal', 'sinusoid')",
            "mask_rate > 0 and mask_rate < 1", "mask_in_encoder >= 0 and mask_in_encoder <= 1",
            "rel_pos_buckets == 0 or rel_pos_buckets >= 4 and rel_pos_buckets % 2 == 0",
            "rel_pos_max_distance > rel_pos_buckets // 4", "encoder_fill in ('mask', 'random')",
            "decoder_layers > 0 or decoder_layers == 0 and mask_in_encoder == 1 and decoder_dim == encoder_dim",
            "decoder_self == 'bi' or decoder_cross and decoder_self in ('uni', 'none')",
            "decoder_dim > 0 and decoder_dim % (encoder_dim // encoder_heads) == 0", "dropout >= 0 and dropout < 1",
        ):
            if not eval(rule, None, vars(self)):
                raise ValueError(f"{rule.split()[0]}={getattr(self, rule.split()[0])!r}: it needs {rule}")

    def masks_per_row(self, n: int) -> int:
        """k, the number of predicted positions in a row of n tokens: 77 of 512 at 15 % (App. C)."""
        return round(self.mask_rate * n)


PRESETS = {  # as differences from the defaults; section 4.1 and Table 4
    "toy": dict(vocab_size=2048, seq_len=64, encoder_layers=3, encoder_dim=128, encoder_heads=2, dropout=0.0,
                decoder_layers=1, norm="pre", init_std=0.06, position_init="sinusoid"),
    "small": dict(vocab_size=8192, seq_len=128, encoder_layers=6, encoder_dim=384, encoder_heads=6,
                  decoder_layers=2, norm="pre", init_std=0.03, position_init="sinusoid"),
    "base": dict(), "base++": dict(vocab_size=64000, rel_pos_buckets=64),
    "large++": dict(vocab_size=64000, encoder_layers=24, encoder_dim=1024, encoder_heads=16,
                    rel_pos_buckets=128, rel_pos_max_distance=256),
}

ABLATIONS = {  # Table 2, row by row, as differences from MAE-LM; Figure 4 is mask_in_encoder = 0, 0.25 ... 1
    "mae-lm": dict(), "mlm": dict(mask_in_encoder=1.0, decoder_layers=0),
    "enc-mask": dict(mask_in_encoder=1.0), "enc-mask-dec-resets": dict(mask_in_encoder=1.0, decoder_reset=True),
    "random-replace": dict(mask_in_encoder=1.0, encoder_fill="random"),
    "misaligned": dict(aligned_positions=False), "no-relative": dict(rel_pos_buckets=0),
    "bi+cross": dict(decoder_cross=True), "uni+cross": dict(decoder_self="uni", decoder_cross=True),
    "cross": dict(decoder_self="none", decoder_cross=True), "dec-2": dict(decoder_layers=2),
    "dec-6": dict(decoder_layers=6), "dec-512": dict(decoder_dim=512), "dec-1024": dict(decoder_dim=1024),
}


# ---- 2. Removing the masked positions: section 3, App. C ----------------------------------------------------
class Corruption(NamedTuple):
    """A masked batch. Removed positions are in neither `kept` nor `tokens`: the encoder cannot see them."""
    masked: Tensor  # (B, n) bool, the set M
    kept: Tensor  # (B, m) int64, original positions that the encoder reads, ascending
    tokens: Tensor  # (B, m) int64, what it reads there


def corrupt(tokens: Tensor, config: Config, generator: torch.Generator) -> Corruption:
    """Draw exactly k masked positions a row, uniformly among its non-special tokens, and remove them. Section 3.
    tokens (B, n) int64 on the generator's device -> Corruption with m = n - k + round(delta * k). Pure: the
    same generator state gives the same result. ValueError if a row has fewer than k real tokens."""
    B, n = tokens.shape
    k = config.masks_per_row(n)
    shown = round(config.mask_in_encoder * k)
    special = tokens < NUM_SPECIAL
    if not 0 < k <= n - int(special.sum(1).max()):
        raise ValueError(f"mask_rate={config.mask_rate} masks {k} of {n} tokens a row: use 1 ... its real tokens")
    noise, u = torch.rand(2, B, n, generator=generator, device=tokens.device)
    chosen = noise.masked_fill(special, 2.0).topk(k, largest=False).indices  # (B, k), in random order
    masked = torch.zeros_like(special).scatter(1, chosen, True)
    removed = torch.zeros_like(special).scatter(1, chosen[:, shown:], True)
    kept = (~removed).nonzero()[:, 1].view(B, -1)
    real = torch.randint(NUM_SPECIAL, config.vocab_size, (B, n), generator=generator, device=tokens.device)
    random, unchanged = (0.1, 0.1) if config.bert_trick else (float(config.encoder_fill == "random"), 0.0)
    fill = torch.where(u < random, real, torch.where(u < random + unchanged, tokens, MASK))
    return Corruption(masked, kept, torch.where(masked, fill, tokens).gather(1, kept))


# ---- 3. Relative positions: section 4.1 (Raffel et al., 2019), App. C ---------------------------------------
def relative_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """T5's bidirectional buckets of distance = key position - query position: int64 of any shape -> int64. Half are
    for keys to the right; in each half, half are single distances, the rest grow by a factor up to max_distance."""
    # Differs from the paper: its code has another formula, with one bucket unused; the text cites T5, as here.
    half = num_buckets // 2
    exact = half // 2
    size = distance.abs()
    scale = (half - exact) / torch.tensor(max_distance / exact, dtype=torch.float64).log()
    log = exact + ((size.clamp(min=exact).double() / exact).log() * scale + 1e-9).long()
    return half * (distance > 0) + torch.where(size < exact, size, log.clamp(max=half - 1))


class RelativeBias(nn.Module):
    """One learned number for each bucket and head, added to attention logits; one table for all layers."""
    def __init__(self, config: Config):
        super().__init__()
        self.table = nn.Embedding(config.rel_pos_buckets, config.encoder_heads)
        distance = torch.arange(1 - config.seq_len, config.seq_len)  # (2n - 1,)
        bucket = relative_bucket(distance, config.rel_pos_buckets, config.rel_pos_max_distance)
        self.register_buffer("bucket", bucket, persistent=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Original positions (B, q) and (B, k) int64 -> (B, heads, q, k); removed tokens leave gaps."""
        k, keys = keys.shape[1], F.pad(keys, (0, -keys.shape[1] % 8))  # GPU kernels want rows a multiple of 8 apart
        values = self.table(self.bucket).t()  # (heads, 2n - 1)
        index = keys[:, None, :] - queries[:, :, None] + len(self.bucket) // 2  # (B, q, k)
        flat = index.flatten(1)[:, None].expand(-1, len(values), -1)  # (B, heads, q * k)
        bias = values.expand(len(index), -1, -1).gather(2, flat).unflatten(2, index.shape[1:])
        return bias.to(compute_dtype(bias.device.type))[..., :k]  # cast once, for all layers


def causal_bias(queries: Tensor, keys: Tensor) -> Tensor:
    """Positions (B, q) and (B, k) int64 -> (B, 1, q, k): -inf where the key comes after the query."""
    return torch.zeros((), device=keys.device).where(keys[:, None, None, :] <= queries[:, None, :, None], -torch.inf)


def attention_bias(positions: nn.Module | None, queries: Tensor, keys: Tensor, padding: Tensor | None = None):
    """What is added to the logits, or None: the bias of `positions`, if any, and -inf at padded keys (B, k) bool."""
    bias = positions(queries, keys) if positions else None
    if padding is None:
        return bias
    hidden = torch.zeros((), device=padding.device).where(~padding, -torch.inf)[:, None, None, :]
    return hidden if bias is None else (bias + hidden).to(bias.dtype)


# ---- 4. Transformer layers: section 2.1 ---------------------------------------------------------------------
def compute_dtype(device_type: str) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, else float32."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float32


def take(x: Tensor, at: Tensor | None) -> Tensor:
    """The rows of x (B, n, d) at positions at (B, k) int64 -> (B, k, d); all of x for None."""
    return x if at is None else x.gather(1, at[:, :, None].expand(-1, -1, x.shape[-1]))


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element of x (any shape) with probability p, to 1/65536 on a CPU, and divide the rest by 1 - p."""
    if p == 0 or not x.is_cpu:  # a CPU needs half the time for 16 random bits an element
        return F.dropout(x, p)
    bits = torch.empty(x.numel() // 4 + 1, dtype=torch.int64).random_(-2 ** 63, None).view(torch.int16)
    return x * (bits[:x.numel()].view(x.shape) >= round(p * 65536) - 32768).to(x.dtype).mul_(1 / (1 - p))


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Softmax(Q K^T / sqrt(d_h) + bias) V with dropout p on the weights, section 2.1. q (B, heads, q, d_h), k and v
    (B, heads, k, d_h), bias None or broadcastable to (B, heads, q, k), -inf to hide a key -> (B, heads, q, d_h)."""
    if q.is_cuda:
        # One fused kernel; not cuDNN's, which may read a mask as another dtype. A CPU is faster with the formula.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
    logits = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    weights = (logits if bias is None else logits + bias).float().softmax(dim=-1).to(q.dtype)
    return dropout(weights, p) @ v


class Attention(nn.Module):
    """MHSA of section 2.1: head_h = Attn(X W_h^Q, Y W_h^K, Y W_h^V), Concat(head_1 ... head_N) W^O."""
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.p = heads, dropout
        self.query, self.key_value, self.output = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """Queries from x (B, q, d), keys and values from y (B, k, d) -> (B, q, d)."""
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, length, d_h)
                   for z in (self.query(x), *self.key_value(y).chunk(2, dim=-1)))
        z = attention(q, k, v, bias, self.p * self.training)
        return self.output(z.transpose(1, 2).flatten(2))  # (B, q, d)


class Residual(nn.Module):
    """A sub-layer f with its skip connection: LayerNorm(x + f(x)) for post, x + f(LayerNorm(x)) for pre."""
    def __init__(self, f: nn.Module, dim: int, norm: str, dropout: float):
        super().__init__()
        self.f, self.norm, self.p, self.pre = f, nn.LayerNorm(dim), dropout, norm == "pre"

    def forward(self, x: Tensor, *context, at: Tensor | None = None, itself: bool = False) -> Tensor:
        """x (B, n, d) -> (B, n, d), or (B, k, d) at positions `at`; itself: x is the first context too."""
        y = self.norm(x) if self.pre else x
        context = (y, *context) if itself else context
        x = take(x, at) + dropout(self.f(take(y, at), *context), self.p * self.training)
        return x if self.pre else self.norm(x)


class Block(nn.Module):
    """A Transformer layer: self-attention and cross-attention where present, then the FFN with exact GELU."""
    def __init__(self, config: Config, dim: int, dropout: float, self_attention: bool = True, cross: bool = False):
        super().__init__()
        heads = dim * config.encoder_heads // config.encoder_dim
        rest = dim, config.norm, dropout
        self.self_attention = Residual(Attention(dim, heads, dropout), *rest) if self_attention else None
        self.cross_attention = Residual(Attention(dim, heads, dropout), *rest) if cross else None
        self.ffn = Residual(nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)), *rest)

    def forward(self, x: Tensor, bias: Tensor | None = None, memory: Tensor | None = None,
                at: Tensor | None = None) -> Tensor:
        """x (B, n, d), memory (B, m, d) -> (B, n, d). With `at` (B, k) only these positions are computed, as
        the last layer may: keys and values still come from all n, so the result is exactly those rows."""
        x = self.self_attention(x, bias, at=at, itself=True) if self.self_attention else take(x, at)
        if self.cross_attention is not None:
            x = self.cross_attention(x, memory)
        return self.ffn(x)


# ---- 5. Encoder: H^0 of section 3 to H^L --------------------------------------------------------------------
class Encoder(nn.Module):
    """The model that is kept. Reads real tokens at their original positions; section 3, App. C."""
    def __init__(self, config: Config):
        super().__init__()
        d = config.encoder_dim
        self.token_embedding = nn.Embedding(config.vocab_size, d)
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm, self.p = nn.LayerNorm(d), config.dropout
        self.bias = RelativeBias(config) if config.rel_pos_buckets else None
        self.blocks = nn.ModuleList(Block(config, d, config.dropout) for _ in range(config.encoder_layers))
        self.final_norm = nn.LayerNorm(d) if config.norm == "pre" else nn.Identity()

    def forward(self, tokens: Tensor, positions: Tensor, padding: Tensor | None = None,
                all_layers: bool = False, at: Tensor | None = None) -> Tensor | list[Tensor]:
        """tokens (B, m) int64 at original positions (B, m) or (1, m) int64, padding (B, m) bool, True = ignore
        -> H^L (B, m, d), at `at` (B, k) only if given; with all_layers the list H^0 ... H^L."""
        h = self.token_embedding(tokens) + self.position_embedding(positions)  # h_i^0 = e_{x_i} + p_i
        # Differs from the paper: its formula has no LayerNorm here; its code, like BERT, has.
        states = [dropout(self.norm(h), self.p * self.training).to(compute_dtype(h.device.type))]
        bias = attention_bias(self.bias, positions, positions, padding)
        for block in self.blocks[:-1]:
            states.append(block(states[-1], bias))
        if at is not None:
            bias = attention_bias(self.bias, positions.expand(len(at), -1).gather(1, at), positions, padding)
        states.append(self.final_norm(self.blocks[-1](states[-1], bias, at=at)))
        return states if all_layers else states[-1]


# ---- 6. Decoder: section 3, "Decoder Configuration" ---------------------------------------------------------
class Decoder(nn.Module):
    """A shallow stack over all n positions, used in pre-training only; no dropout (App. C)."""
    def __init__(self, config: Config):
        super().__init__()
        d, self.cross = config.decoder_dim, config.decoder_cross
        self.project = nn.Linear(config.encoder_dim, d) if config.encoder_dim != d else nn.Identity()  # Table 2
        # Differs from the paper: it writes one p_i; its code, and ours, learn a table of the decoder's own.
        self.position_embedding = nn.Embedding(config.seq_len, d)
        self.norm = nn.LayerNorm(d)
        self.bias = causal_bias if config.decoder_self == "uni" else None
        self.blocks = nn.ModuleList(Block(config, d, 0.0, config.decoder_self != "none", config.decoder_cross)
                                    for _ in range(config.decoder_layers))
        self.final_norm = nn.LayerNorm(d) if config.norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, at: Tensor) -> Tensor:
        """Unpositioned H-hat^0 (B, n, d), memory H^L (B, m, d), at (B, k) int64 -> (B, k, decoder_dim)."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        memory = self.project(memory) if self.cross else None
        x = self.norm(self.project(x) + self.position_embedding(positions)).to(compute_dtype(x.device.type))
        for block in self.blocks[:-1]:
            x = block(x, attention_bias(self.bias, positions, positions), memory)
        return self.final_norm(self.blocks[-1](x, attention_bias(self.bias, at, positions), memory, at))


# ---- 7. The model and its loss: Eq. (1) ---------------------------------------------------------------------
class Head(nn.Module):
    """Logits e_x^T h over the vocabulary, with the encoder's token embeddings E tied; Eq. (1)."""
    def __init__(self, config: Config):
        super().__init__()
        # Differs from the paper: Eq. (1) has e_x^T h_i alone; its code, like BERT, transforms h_i first.
        self.transform = nn.Sequential(nn.Linear(config.decoder_dim, config.encoder_dim), nn.GELU(),
                                       nn.LayerNorm(config.encoder_dim))
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
        self.decoder = Decoder(config) if config.decoder_layers else None
        self.head = Head(config)
        for name, p in self.named_parameters():  # matrices N(0, init_std), biases 0, LayerNorm the identity
            nn.init.normal_(p, std=config.init_std) if p.ndim == 2 else nn.init.constant_(p, name.endswith("weight"))
        if config.position_init == "sinusoid":
            # As large as what is added to them: embeddings of deviation init_std in the encoder, in the decoder
            # H^L, which a LayerNorm has scaled to 1 and next to which N(0, init_std) would be lost.
            for part, std in ((self.decoder or self.encoder, 1.0), (self.encoder, config.init_std)):
                sinusoid_(part.position_embedding.weight, std)

    def decoder_input(self, h: Tensor, corruption: Corruption) -> Tensor:
        """H-hat^0 of section 3 without p_i: h_i^L (B, m, d) back at the kept positions, e_[MASK] elsewhere,
        and at all masked positions if decoder_reset -> (B, n, d)."""
        masked, kept, _ = corruption
        e_mask = self.encoder.token_embedding.weight[MASK].to(h.dtype)
        full = e_mask.expand(*masked.shape, -1).scatter(1, kept[:, :, None].expand_as(h), h)
        return torch.where((masked & self.config.decoder_reset)[:, :, None], e_mask, full)

    def encode(self, corruption: Corruption, at: Tensor | None = None) -> Tensor:
        """The encoder on what is kept -> H^L (B, m, d), or its rows `at` (B, k)."""
        _, kept, tokens = corruption
        consecutive = torch.arange(kept.shape[1], device=kept.device)[None]
        removed = kept.shape[1] < corruption.masked.shape[1]
        return self.encoder(tokens, kept if self.config.aligned_positions and removed else consecutive, at=at)

    def logits(self, tokens: Tensor, corruption: Corruption, at: Tensor) -> Tensor:
        """Predictions (B, k, V) at positions at (B, k) int64. `tokens` are read by the "uni" decoder only."""
        if self.decoder is None:
            return self.head(self.encode(corruption, at), self.encoder.token_embedding.weight)
        h = self.encode(corruption)
        x = self.decoder_input(h, corruption)
        if self.config.decoder_self == "uni":  # as in BART: position i reads x_{i-1}, for h_i would tell x_i
            x = self.encoder.token_embedding(torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1))
        return self.head(self.decoder(x, h, at), self.encoder.token_embedding.weight)

    def predicted(self, masked: Tensor) -> Tensor:
        """Positions (B, k) int64 of the loss: the k masked ones of each row; the whole sequence for "uni"."""
        B, n = masked.shape
        if self.config.decoder_self == "uni":
            return torch.arange(1, n, device=masked.device).expand(B, -1)
        return masked.int().topk(self.config.masks_per_row(n)).indices

    def forward(self, tokens: Tensor, corruption: Corruption) -> Tensor:
        """tokens (B, n) int64 -> mean of -log p(x_i | x-hat) over the masked positions, nats; Eq. (1)."""
        at = self.predicted(corruption.masked)
        logits = self.logits(tokens, corruption, at)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.gather(1, at).flatten())


def sinusoid_(table: Tensor, std: float) -> None:
    """Fill position embeddings (n, d) in place with sines and cosines (Vaswani et al., 2017) of deviation std."""
    angle = torch.arange(len(table))[:, None] * 10000 ** -torch.linspace(0, 1, (table.shape[1] + 1) // 2)
    table.data.copy_(std * 2 ** 0.5 * torch.cat([angle.sin(), angle.cos()], dim=1)[:, :table.shape[1]])
