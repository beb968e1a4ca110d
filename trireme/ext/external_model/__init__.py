"""A model behind an OpenAI API, which bench measures: `model.external_model`."""
