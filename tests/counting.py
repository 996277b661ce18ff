"""Gives an accountant steps to count without a training: those of a stand-in for a model, which it follows."""

import types

from tfdp_rec.core.claim.entries import Entry
from tfdp_rec.core.claim.meter import Meter


def count(accountant, event, steps, sampling=None):
    """Has an accountant follow a model of so many steps; under a ledger they are paid for before."""
    model = types.SimpleNamespace(privacy_history=Meter())
    id = accountant.spending.payments.pay_steps(event, steps) if accountant.spending.payments.ledger else None
    model.privacy_history.add_entry(Entry(event, steps, (sampling or accountant.sampling).get_state()), id)
    accountant.follow(model)
    accountant.set_event(event)
