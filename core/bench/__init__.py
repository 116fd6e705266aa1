"""`moonpool bench`: how fast bytes move here, as handy as iperf3.

load.py drives threads and keeps their latencies; transfer.py and store.py say what one operation is;
control.py and peer.py are the other side of a transfer; report.py shows it. Nothing here is a claim about
speed: those are scripts in benchmarks/, beside their peers.
"""
