def tiny_model(**k):
    return None
