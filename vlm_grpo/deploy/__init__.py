"""Using a trained model: predict, evaluate and export."""
