"""MAE-LM (Meng et al., 2024) for the library `transformers`: what AutoModel and its like load from a folder that

    python -m support.convert export out/toy DIR

has written. The folder holds a copy of this file and of maelm.py, which computes everything: here are only the
interface and the heads. Load it with `trust_remote_code=True`.
"""
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import can_return_tuple

from .maelm import MASK, Config, Decoder, Encoder, Head, RelativeBias


class MAELMConfig(PretrainedConfig):
    """config.json: the fields of maelm.Config under "maelm", and under transformers' names what others ask for."""
    model_type = "maelm"


class MAELMModel(PreTrainedModel):
    """The encoder. The models with heads are subclasses: a weight has the same name in all, that of maelm.MAELM."""
    config_class = MAELMConfig
    base_model_prefix = "maelm"
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^head\."]  # where only the encoder is asked for

    def __init__(self, config: MAELMConfig):
        super().__init__(config)
        # AutoModel.from_pretrained allows to change the dropout, under transformers' name.
        self.shape = Config(**config.maelm | {"dropout": config.hidden_dropout_prob})
        self.encoder = Encoder(self.shape)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initial values of what the folder does not hold: new heads, and a buffer that is in no file."""
        super()._init_weights(module)
        if isinstance(module, RelativeBias):
            # transformers makes models without memory before it loads them, which loses what this holds.
            module.bucket.copy_(RelativeBias(self.shape).bucket)

    def get_input_embeddings(self) -> nn.Embedding:
        """The embeddings e_x."""
        return self.encoder.token_embedding

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                output_hidden_states: bool | None = None, **others) -> BaseModelOutput:
        """input_ids (B, n) int64, attention_mask (B, n), 0 = padding, position_ids (B, n) int64, without which padding
        has to be on the right. What else the encoders of transformers take, such as token_type_ids, is ignored.
        ValueError for more tokens than there are positions."""
        n = input_ids.shape[1]
        if n > self.shape.seq_len:
            raise ValueError(f"{n} tokens, but this model reads at most {self.shape.seq_len}: give the tokenizer "
                             "truncation=True")
        if position_ids is None:
            position_ids = torch.arange(n, device=input_ids.device)[None]  # (1, n)
        padding = None if attention_mask is None else attention_mask == 0
        states = self.encoder(input_ids, position_ids, padding, all_layers=True)  # H^0 ... H^L, (B, n, d) each
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return BaseModelOutput(states[-1], tuple(states) if output_hidden_states else None)


class MAELMForMaskedLM(MAELMModel):
    """Encoder, decoder and head: predicts [MASK]. In pre-training an MAE-LM's encoder does not read [MASK]. Here it is
    hidden as a key instead of removed, which is the same for all other tokens, and keeps rows equally long."""

    def __init__(self, config: MAELMConfig):
        super().__init__(config)
        self.decoder = Decoder(self.shape) if self.shape.decoder_layers > 0 else None
        self.head = Head(self.shape)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
                **options) -> MaskedLMOutput:
        """As MAELMModel; labels (B, n) int64, -100 where there is no loss -> logits (B, n, V)."""
        masked = input_ids == MASK
        real = torch.ones_like(masked) if attention_mask is None else attention_mask != 0
        reads_mask = self.shape.mask_in_encoder > 0.5  # as pre-training shows a single [MASK] to the encoder
        seen = real if reads_mask else real & ~masked  # by the encoder; the decoder sees [MASK], too
        if not reads_mask and not self.shape.aligned_positions:  # positions do not skip what is removed
            options["position_ids"] = ((~masked).cumsum(1) - 1).clamp(min=0)
        out = super().forward(input_ids, seen, return_dict=True, **options)
        z = h = out.last_hidden_state  # (B, n, d)
        embeddings = self.encoder.token_embedding.weight
        if self.decoder is not None:
            if not reads_mask or self.shape.decoder_reset:  # e_[MASK] where [MASK] is removed, or to be forgotten
                h = torch.where(masked[:, :, None], embeddings[MASK], h)
            z = self.decoder(h, h, padding=~real)  # (B, n, decoder_dim)
        logits = self.head(z, embeddings)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.shape.vocab_size)
        return MaskedLMOutput(loss, logits, out.hidden_states)
