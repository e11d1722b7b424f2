"""The tokenizer stage: text to token ids and back, and chat templates.

stage.py               the process: sockets, the encoding thread, models
service.py             the reply to each frame
encode_queue.py        the queue of long texts, encoded by one thread
vocabulary.py          a model's vocabulary
pretokenizers.py       how text is split before merges
chunked_encode.py      long texts chunk by chunk
token_lower_bound.py   a lower bound of a text's token count
template.py            chat templates
"""
