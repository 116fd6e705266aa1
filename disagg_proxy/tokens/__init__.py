"""From a request's text to the token ids that the engine will see: where they come from, what they cost, and
whether they are right.

Ids are bytes here: u32, little-endian, as the hashes of blocks are made of. A prompt whose ids are not known
in time is routed without its prefix, never refused. ``engine_source`` asks the engine itself, which is exact
and costs it and us a request; ``local_source`` renders the chat template and tokenises in threads of our own.
"""
