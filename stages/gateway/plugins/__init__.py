"""Plugins: code of the operator's that sees requests before they are computed, and answers before they are sent.

interface.py        what a plugin is, for its author (`starling.plugins`)
frames.py           the frames between the gateway and the process of a plugin
plugin_process.py   that process
process_client.py   the gateway's end of it: start, calls in order, time limits, restarts
request_hook.py     `pre_inference`: from a `GenerationRequest` to what a plugin gets, and back
text_filter.py      `post_inference`: the text of a sequence on its way to the client
plugins.py          all of them, in the configured order

Without plugins in the configuration nothing of this is imported.
"""
