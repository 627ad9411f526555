"""MAE-LM (Meng et al., 2024) for the library `transformers`, in a folder that `python -m support.export` wrote.
The folder also contains maelm.py and heads.py, which do the computing; this file adds the interface.
"""
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_outputs as outputs
from transformers.utils import can_return_tuple, versions

from .heads import ClassifierHead, SpanHead
from .maelm import MASK, Config, Decoder, Encoder, Head

versions.require_version("transformers>=4.55")  # earlier versions leave new heads uninitialized


def read(input_ids, attention_mask, position_ids):
    """Which tokens are real, (B, n) bool, and their positions (B, n), given or counted. In a text of only padding, all
    tokens count as real."""
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    real = (real != 0) | (real == 0).all(1, keepdim=True)
    counted = (real.long().cumsum(1) - 1).clamp(min=0)
    return real, counted if position_ids is None else position_ids


class MAELMConfig(PretrainedConfig):
    """config.json: the fields of maelm.Config under "maelm", and fields with transformers' names."""
    model_type = "maelm"


class MAELMModel(PreTrainedModel):
    """The encoder. Models with heads are subclasses, and all weights have the same names as in maelm.MAELM."""
    config_class = MAELMConfig
    base_model_prefix = "maelm"
    _keys_to_ignore_on_load_unexpected = [r"^(decoder|head|classifier|qa_outputs)\."]  # when only the encoder is loaded
    accepts_loss_kwargs = False  # so that Trainer divides the loss by its number of accumulation steps

    def __init__(self, config: MAELMConfig):
        super().__init__(config)
        # A caller may change the dropout, or add tokens to the vocabulary of the encoder.
        self.shape = Config(**config.maelm | {"dropout": config.hidden_dropout_prob, "vocab_size": config.vocab_size})
        self.encoder = Encoder(self.shape)
        self.post_init()

    def post_init(self):
        """Also take all buffers from the folder, because transformers creates models on a device without values."""
        for module in self.modules():
            for name, buffer in [*module.named_buffers(recurse=False)]:
                module.register_buffer(name, buffer)
        super().post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embeddings e_x."""
        return self.encoder.token_embedding

    def set_input_embeddings(self, embeddings: nn.Embedding):
        """Replace the embeddings e_x, as resize_token_embeddings does for added tokens."""
        self.encoder.token_embedding = embeddings

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, position_ids=None,
                output_hidden_states: bool | None = None, **others) -> outputs.BaseModelOutput:
        """input_ids (B, n) int64, attention_mask (B, n), 0 = padding, position_ids (B, n); ignores most `others`."""
        if others.get("output_attentions") or self.config.output_attentions:
            raise ValueError("this model does not return attentions; remove output_attentions=True")
        n, most = input_ids.shape[1], self.shape.seq_len
        if n > most:
            raise ValueError(f"{n} tokens, but this model reads at most {most}; give the tokenizer truncation=True")
        real, positions = read(input_ids, attention_mask, position_ids)
        states = self.encoder.hidden_states(input_ids, positions, ~real)  # H^0 ... H^L, (B, n, d) each
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return outputs.BaseModelOutput(states[-1], tuple(states) if output_hidden_states else None)


class MAELMForMaskedLM(MAELMModel):
    """Encoder, decoder and head, to predict [MASK]. In pre-training, [MASK] is removed from the input of an MAE-LM's
    encoder. Here, it is only hidden as a key. This has the same effect on all other tokens, and keeps texts aligned."""
    def __init__(self, config: MAELMConfig):
        super().__init__(config)
        self.decoder = Decoder(self.shape) if self.shape.decoder_layers > 0 else None
        self.head = Head(self.shape)
        self.post_init()

    def resize_token_embeddings(self, *given, **options) -> nn.Embedding:
        """As in transformers; added tokens have a bias of 0."""
        embeddings = super().resize_token_embeddings(*given, **options)
        added = len(embeddings.weight) - len(self.head.bias)
        self.head.bias = nn.Parameter(nn.functional.pad(self.head.bias.data, (0, added)))
        return embeddings

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, **options) -> outputs.MaskedLMOutput:
        """As in MAELMModel; labels (B, n) int64, -100 where there is no loss -> logits (B, n, V)."""
        masked = input_ids == MASK
        real, positions = read(input_ids, attention_mask, options.pop("position_ids", None))
        reads_mask = self.shape.mask_in_encoder > 0.5  # whether pre-training would show a single [MASK] to the encoder
        seen = real if reads_mask else real & ~masked  # the encoder's input; the decoder also sees [MASK]
        seen_at = positions if self.shape.aligned_positions else None  # None: only the seen tokens are counted
        out = super().forward(input_ids, seen, seen_at, return_dict=True, **options)
        z = h = out.last_hidden_state  # (B, n, d)
        embeddings = self.encoder.token_embedding.weight
        if self.decoder is not None:
            if not reads_mask or self.shape.decoder_reset:  # put e_[MASK] in the gaps, as fill_gaps does
                h = torch.where(masked[:, :, None], embeddings[MASK], h)
            z = self.decoder(h, positions, ~real)  # (B, n, decoder_width)
        logits = self.head(z, embeddings)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return outputs.MaskedLMOutput(loss, logits, out.hidden_states)


class MAELMForSequenceClassification(MAELMModel):
    """The encoder with finetune.py's head for labels and numbers."""
    def __init__(self, config: MAELMConfig):
        super().__init__(config)
        self.classifier = ClassifierHead(self.shape.encoder_dim, config.num_labels, self.shape.dropout)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, **options) -> outputs.SequenceClassifierOutput:
        """As in MAELMModel; labels (B,) int64, or float32 for numbers -> logits (B, C)."""
        out = super().forward(input_ids, attention_mask, return_dict=True, **options)
        real, _ = read(input_ids, attention_mask, None)
        logits = self.config.center + self.config.scale * self.classifier(out.last_hidden_state, ~real)
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return outputs.SequenceClassifierOutput(loss, logits, out.hidden_states)


class MAELMForQuestionAnswering(MAELMModel):
    """The encoder with finetune.py's head for SQuAD, which finds the first and last token of an answer, or [CLS]."""
    def __init__(self, config: MAELMConfig):
        super().__init__(config)
        self.qa_outputs = SpanHead(self.shape.encoder_dim)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, start_positions=None,
                end_positions=None, **options) -> outputs.QuestionAnsweringModelOutput:
        """As in MAELMModel; start_positions and end_positions (B,) int64 -> logits (B, n) of both."""
        out = super().forward(input_ids, attention_mask, return_dict=True, **options)
        real, _ = read(input_ids, attention_mask, None)
        starts, ends = self.qa_outputs(out.last_hidden_state, ~real).unbind(2)
        loss = self.loss_function(starts, ends, start_positions, end_positions)
        return outputs.QuestionAnsweringModelOutput(loss, starts, ends, out.hidden_states)
