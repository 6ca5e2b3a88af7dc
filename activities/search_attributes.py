"""Everburn's search attributes: filters for runs in the Temporal UI."""

from temporalio.common import SearchAttributeKey

RUN = SearchAttributeKey.for_keyword("EverburnRun")
STEP = SearchAttributeKey.for_int("EverburnStep")
ROW = SearchAttributeKey.for_int("EverburnRow")
POLICY_VERSION = SearchAttributeKey.for_int("EverburnPolicyVersion")
REWARD = SearchAttributeKey.for_float("EverburnReward")

SEARCH_ATTRIBUTES = (RUN, STEP, ROW, POLICY_VERSION, REWARD)
