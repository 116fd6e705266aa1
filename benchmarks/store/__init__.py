"""The store benchmark in parts: workload (what is done), drivers (how each store does it), client (the
process that measures), servers (the processes that store), rows (figures against targets).

Client processes run under the interpreter that has their store's package; workload, memory, drivers and
client therefore use the standard library alone, and of moonpool what needs no more (processes.SOURCES).
"""
