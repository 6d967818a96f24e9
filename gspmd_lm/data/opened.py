"""The rows of a config whose model sees images or hears sounds."""

from gspmd_lm.config import Config
from gspmd_lm.data import captions, images, media, objects, sounds
from gspmd_lm.data.remote import Progress


def opened(config: Config, progress: Progress | None = None) -> media.Opened | None:
    """Images with labels, with texts or with masks, or sounds with texts; None for a model of texts alone. Raises
    InputError where the source does not hold them.
    """
    model = config.model
    if model.masks:
        return objects.open_objects(config, progress)
    if model.patches:
        return images.open_images(config, progress)
    if model.vision:
        return captions.open_captions(config, progress)
    return sounds.open_sounds(config, progress) if model.frames else None
