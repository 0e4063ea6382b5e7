"""A chat model of a few thousand weights: a tokenizer of bytes with merges, a chat template, and a Qwen3 that ends a turn now and then."""

from __future__ import annotations

from pathlib import Path

# Qwen2.5's conversation part.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKERS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|endoftext|>"]
VOCABULARY = 400
_HIDDEN = 64
# With it one token in about eight ends the turn.
_END_LOGIT = 4.0


def write_tokenizer(folder: Path, template: str = CHATML) -> Path:
    """The tokenizer and the template, as a model folder has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant\n\nthe answer is the answer", "board after your move: the board"] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def write_model(folder: Path) -> Path:
    """The whole model. It says nothing that makes sense."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    end = MARKERS.index("<|im_end|>")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=_HIDDEN,
            intermediate_size=_HIDDEN,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=MARKERS.index("<|endoftext|>"),
        )
    )
    with torch.no_grad():
        # One number of every token's vector is large, so that the norm leaves √hidden there: a bias for the logit of the turn's end.
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[end, 0] = _END_LOGIT / _HIDDEN**0.5
    model.save_pretrained(folder)
    return write_tokenizer(folder)
