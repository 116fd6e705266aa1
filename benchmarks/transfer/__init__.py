"""The transfer benchmark in parts: cells (what is moved), drivers (how each engine moves it), target (the
process whose memory is written or read), initiator (the process that calls and measures), rows (figures
against targets).

Targets and initiators run under the interpreter that has their engine's package; all but the drivers
therefore use the standard library alone, and of moonpool what needs no more (processes.SOURCES).
"""
