"""Text for models: tokenizer, chat template, streaming detokenizer, stop strings.

Submodules are imported one by one, so that only who needs the tokenizers library loads it.
"""
