"""Using a trained model: predict, export and doctor."""
