"""What the proxy costs: a mock engine, a closed-loop load, and routers as users would start them."""
