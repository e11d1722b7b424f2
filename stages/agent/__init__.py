"""The agent: models on one machine of a fleet.

downloads/   pieces of published models, from several sources at once
cache/       what has arrived: bounds, last use, eviction, adoption after a crash
"""
