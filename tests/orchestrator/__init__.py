"""Tests of stages/orchestrator."""
