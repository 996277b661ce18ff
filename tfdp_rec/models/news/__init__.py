"""News recommenders: NRMS, NAML and PLM-NR encoders under one model with public basis vectors."""

from tfdp_rec.models.news.bert import pretrained_bert
from tfdp_rec.models.news.encoders import NAMLEncoder, NRMSEncoder, PLMEncoder
from tfdp_rec.models.news.layers import tiny_transformer
from tfdp_rec.models.news.model import NewsRecommender, user_encoder

__all__ = [
    "NAMLEncoder",
    "NRMSEncoder",
    "NewsRecommender",
    "PLMEncoder",
    "pretrained_bert",
    "tiny_transformer",
    "user_encoder",
]
