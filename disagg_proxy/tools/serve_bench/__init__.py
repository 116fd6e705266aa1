"""A load generator for an OpenAI API: conversations of several turns that share their beginnings, and the
same load without anything in common, side by side.

conversations  the prompts: seeded token ids
run            sends them with the client of the replay, and sums up
report         both runs in a table and as JSON
"""
