"""The Flower app of a federated run: `client_app.py` and `server_app.py`, which Flower loads, and how to run them.

pyproject.toml of a run   its settings, as [tool.flwr.app.config]
client_app.py: app        a participant for each node, behind the guard mod, masked if the run says so
server_app.py: app        FedAdam over the initial weights; writes the trained ones
"""
