"""The learner: model, packing, attention, update."""
