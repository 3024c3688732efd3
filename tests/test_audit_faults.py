"""The mutation test of the audit: every planted fault is found and called by its name; a healthy run raises none."""

import pytest
from audit_faults import FAULTS, microbatches, model

import nvfp4_train as nt
from nvfp4_train.recipe import recipe_names


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name, monkeypatch):
    plant, recipe, checks = FAULTS[name]
    net = model(recipe)
    plant(monkeypatch, net)
    found = nt.audit(net, microbatches(net), recipe)
    assert {finding.check for finding in found.findings} & checks, str(found)


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_healthy_run_raises_none(recipe):
    net = model(recipe)
    found = nt.audit(net, microbatches(net), recipe)
    assert found.ok, str(found)
