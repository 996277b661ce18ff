"""The only place that an ε comes from: events, their price, draws and their proof, ledger, meter, accountant."""
