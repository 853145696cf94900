"""The field zoo: models of transformers, torchvision and timm, and the mistakes that people report about them."""
