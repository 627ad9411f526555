"""The three rows of Table 2 whose decoder attends to the encoder's output. Skip this file on a first reading.

    bi+cross    self-attention as in MAE-LM, then cross-attention
    uni+cross   as in BART: position i sees the tokens before it, then H^L; all tokens are predicted
    cross       cross-attention only
"""
from dataclasses import replace

import torch
from torch import nn

from maelm import MAELM, Attention, Block, Corruption, Decoder, align_for_cuda


class CrossBlock(Block):
    """A decoder layer: self-attention (except in "cross"), cross-attention, and the FFN."""
    def __init__(self, config, dim, heads, dropout):
        super().__init__(config, dim, heads, dropout)
        if config.decoder == "cross":
            self.self_attention = self.attention_norm = None
        self.cross_attention = Attention(dim, heads, dropout)
        self.cross_norm = nn.LayerNorm(dim)

    def forward(self, x, memory, bias):
        """x (B, n, d) and memory (B, r, d) -> (B, n, d)."""
        if self.self_attention is not None:
            x = self.sublayer(x, self.self_attention, self.attention_norm, bias)
        x = self.sublayer(x, self.cross_attention, self.cross_norm, None, memory)
        return self.sublayer(x, self.ffn, self.ffn_norm)


class CrossDecoder(Decoder):
    """A Decoder whose layers also attend to H^L."""
    def __init__(self, config):
        self_attention_is_relative = config.decoder == "bi+cross" and config.decoder_relative
        super().__init__(replace(config, decoder_relative=self_attention_is_relative), CrossBlock)
        self.causal = config.decoder == "uni+cross"

    def forward(self, x, memory, at):
        """x (B, n, d), H^L as memory (B, r, d) -> (B, m, decoder_width) at the positions `at` (B, m) int64."""
        n = x.shape[1]
        positions = torch.arange(n, device=x.device)[None]  # (1, n)
        x = self.norm(self.project(x) + self.position_embedding(positions))
        memory = self.project(memory)
        bias = self.stack.attention_bias(positions)
        if self.causal:
            bias = torch.full((1, 1, n, n), -torch.inf, device=x.device).triu(1)  # -inf for keys after the query
            bias = align_for_cuda(bias)
        for block in self.stack.blocks:
            x = block(x, memory, bias)
        return self.stack.final_norm(x.take_along_dim(at[:, :, None], dim=1))


class CrossMAELM(MAELM):
    """An MAE-LM with a CrossDecoder."""
    def __init__(self, config):
        super().__init__(config)
        self.decoder = CrossDecoder(config)
        self.init_parameters()

    def forward(self, tokens, corruption):
        """As in MAELM, but uni+cross predicts all tokens except the first, each from the true tokens before it."""
        if self.config.decoder == "uni+cross":
            B, n = tokens.shape
            after_first = torch.arange(1, n, device=tokens.device).expand(B, -1)
            corruption = Corruption(tokens, after_first, corruption.kept)  # no kept position is masked; see `check`
        return super().forward(tokens, corruption)

    def decode(self, h, corruption):
        """As in MAELM; the decoder also reads h = H^L (B, r, d)."""
        return self.decoder(self.fill_gaps(h, corruption), h, corruption.masked)

    def fill_gaps(self, h, corruption):
        """As in MAELM, but uni+cross reads e_{x_{i-1}} at position i, of the true tokens in training, else of x-hat."""
        if self.config.decoder != "uni+cross":
            return super().fill_gaps(h, corruption)
        text = corruption.corrupted
        shifted = torch.cat([text[:, :1], text[:, :-1]], dim=1)
        return self.encoder.token_embedding(shifted)


DECODERS = {"bi": MAELM, "bi+cross": CrossMAELM, "uni+cross": CrossMAELM, "cross": CrossMAELM}  # by Config.decoder
