from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no reason to fail
settings.load_profile("untimed")
