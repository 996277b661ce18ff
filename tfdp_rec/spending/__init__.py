"""The record of what was spent: each expense is one entry, stored in one place.

- `entries`: an expense is an `Entry` with an id; `Entries` are what a model carries and a file holds.
- `ledger`: a file of payments, written before the data are looked at.
- `filters`: budgets for payments that may be chosen after seeing what earlier ones bought.
- `payments`: how training steps are paid for in a ledger.
- `meter`: counts the steps of a model in their own graph, and refuses those that are not allowed.
- `accountant`, `statement`: what the entries cost, as a number and in words.

With a ledger, an expense is stored in the ledger and the model carries receipts: entries with the ids of payments.
"""
