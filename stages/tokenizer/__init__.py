"""The tokenizer stage: text to token ids and back, and chat templates.

stage.py               the process: sockets, the encoding thread, models
service.py             the reply to each frame
opened_models.py       vocabulary and template of each checkpoint in use
encode_queue.py        the queue of long texts, encoded by one thread
vocabulary.py          a model's vocabulary
byte_level.py          byte-level BPE (`gpt2`)
sentencepiece.py       SentencePiece BPE with scores (`llama`)
word_encoder.py        ids of words by merges, for both
word_cache.py          ids of words, computed once, for all kinds
pair_merger.py         merges of symbols, over mapped tables
kernels/               the same as machine code
whole_pieces.py        pieces that are tokens and not merged
piece_pattern.py       the patterns of pre-tokenizers
unicode_classes.py     the classes of characters that they distinguish
token_table.py         the bytes of tokens, mapped
borders.py             places in a text that no token crosses
token_lattice.py       the best tokens of words, by their scores
unigram.py, wordpiece.py, normalizer.py, covered.py  the other kinds
fill_in_middle.py      the tokens to fill in the middle of a text
chunked_encode.py      long texts chunk by chunk
token_lower_bound.py   a lower bound of a text's token count
template.py            chat templates
chat_messages.py       messages without a system role, and a message to continue
fallback_templates.py  templates for model files that have none
template_budget.py     the templates' sandbox: bounds on time and memory
template_names.py      which filters and methods they may use, by what these cost
tool_format.py          how a model writes tool calls, by its template
reasoning_format.py     how it writes its reasoning, and what switches that
template_selection.py  comparisons, searches and cuts of text, in which marks do not count
template_marks.py      which control tokens of a rendered chat are the template's own
"""
