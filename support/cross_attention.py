"""Three rows of Table 2: decoders with cross-attention to the encoder's output. A first reading of maelm.py needs none.

    bi+cross    self-attention as in MAE-LM, then cross-attention
    uni+cross   as in BART: position i reads x_{i-1} and what is before it, then cross-attends; all tokens are predicted
    cross       cross-attention only
"""
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from maelm import MAELM, MASK, Attention, Block, Decoder, Residual, attention, attention_bias


class CrossAttention(Attention):
    """MHSA whose keys and values are of another sequence."""
    def forward(self, x, memory):
        """Queries of x (B, n, d), keys and values of memory (B, m, d) -> (B, n, d)."""
        k, v = self.key_value(memory).chunk(2, dim=-1)
        q, k, v = [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.query(x), k, v)]
        return self.output(attention(q, k, v).transpose(1, 2).flatten(2))


class CrossBlock(Block):
    """A layer of the decoder: self-attention, unless it is "cross"; cross-attention; FFN."""
    def __init__(self, config, dim, heads):
        super().__init__(config, dim, heads, dropout=0.0)
        if config.decoder == "cross":
            self.self_attention = self.self_residual = None
        self.cross_attention = CrossAttention(dim, heads, 0.0)
        self.cross_residual = Residual(config, dim, 0.0)

    def forward(self, x, memory, bias, at=None):
        """x (B, n, d) and memory (B, m, d) -> (B, n, d), or (B, k, d) at the positions `at` (B, k)."""
        if self.self_attention is not None:
            x = self.self_residual(x, lambda y: self.self_attention(y, bias))
        if at is not None:
            x = x.take_along_dim(at[:, :, None], dim=1)
        x = self.cross_residual(x, lambda y: self.cross_attention(y, memory))
        return self.ffn_residual(x, self.ffn)


class CrossDecoder(Decoder):
    """A Decoder whose layers attend to H^L, too."""
    def __init__(self, config):
        self_attention_is_relative = config.decoder == "bi+cross" and config.decoder_relative
        super().__init__(replace(config, decoder_relative=self_attention_is_relative))
        d, self.causal = config.decoder_width, config.decoder == "uni+cross"
        heads = d * config.encoder_heads // config.encoder_dim
        self.stack.blocks = nn.ModuleList([CrossBlock(config, d, heads) for _ in range(config.decoder_layers)])

    def forward(self, x, memory, at):
        """x (B, n, d), H^L as memory (B, m, d) -> (B, k, decoder_width) at the positions `at` (B, k)."""
        n = x.shape[1]
        positions = torch.arange(n, device=x.device)[None]  # (1, n)
        x = self.norm(self.project(x) + self.position_embedding(positions))
        memory = self.project(memory)
        if self.causal:
            bias = torch.full((1, 1, n, n), -torch.inf, device=x.device).triu(1)  # -inf for keys after the query
        else:
            bias = attention_bias(self.stack.relative_bias, positions, None)
        *lower, last = self.stack.blocks
        for block in lower:
            x = block(x, memory, bias)
        return self.stack.final_norm(last(x, memory, bias, at))


class CrossMAELM(MAELM):
    """An MAE-LM with a CrossDecoder."""
    def __init__(self, config):
        super().__init__(replace(config, decoder="bi"))
        self.config, self.decoder = config, CrossDecoder(config)
        self.init_parameters()

    def forward(self, tokens, corruption):
        """As MAELM, but uni+cross predicts all tokens but the first from the true tokens before them."""
        if self.config.decoder != "uni+cross":
            return super().forward(tokens, corruption)
        B, n = tokens.shape
        at = torch.arange(1, n, device=tokens.device).expand(B, -1)
        logits = self.logits(corruption, at, tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def logits(self, corruption, at, tokens=None):
        """As MAELM. uni+cross reads `tokens` (B, n); without them, the masked text."""
        h = self.encode(corruption)
        if self.config.decoder == "uni+cross":
            if tokens is None:
                gaps = torch.full(corruption.masked.shape, MASK, device=at.device)
                tokens = gaps.scatter(1, corruption.kept, corruption.read)
            shifted = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)  # position i reads x_{i-1}
            x = self.encoder.token_embedding(shifted)
        else:
            x = self.decoder_input(h, corruption)
        z = self.decoder(x, h, at)
        return self.head(z, self.encoder.token_embedding.weight)
