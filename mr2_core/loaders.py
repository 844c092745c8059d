"""Batches from folders of images that do not fit memory, read and augmented by worker processes."""

import signal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mr2_core.data import DataError
from mr2_core.training import Normalise, share, stream

# The customary constants of ImageNet, by channel, on the scale 0 … 1
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Images(Dataset):
    """A torchvision ``ImageFolder`` whose augmentation is a function of seed and position, whoever reads it."""

    def __init__(self, folder, transform, seed: int):
        self.folder, self.transform, self.seed = folder, transform, seed

    def __getitem__(self, position: tuple[int, int, int]) -> tuple[Tensor, int]:
        """Return the image uint8 [H, W, C] and the label at (epoch, index, view)."""
        path, label = self.folder.samples[position[1]]
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the global stream
            torch.default_generator.set_state(stream(self.seed, "augmentation", *position).get_state())
            try:
                image = self.transform(self.folder.loader(path))
            except (OSError, ValueError, SyntaxError) as error:
                raise DataError(f"{path} is not a readable image ({error}): replace or remove it") from error
        return torch.from_numpy(np.array(image)), label


class FolderLoader:
    """The interface of :class:`mr2_core.training.BatchLoader` for a folder with one folder of images a class.

    Batches are equal whatever the number of workers, and in a process group each process yields its share of them.

    Parameters
    ----------
    root : path or :class:`mr2_core.image_sets.Images`
        The folder, ``train`` of ImageNet, say; or a part of an image set.
    batch_size : int
        The last batch of an epoch is dropped when it is smaller, unless it is the only one.
    chosen : array of int, optional
        Indices of the images to use, in the order of ``labels``; all by default.
    size : int
        Side of the images: in training a random resized crop and a flip, else the centre of the resized image.
    resize : int, optional
        Length to which the shorter side is brought before the centre is cut out; 8/7 of ``size`` by default, as 224 is
        cut from 256.
    interpolation : {"bilinear", "bicubic"}
        How images are resized, in training and else.
    seed : int
        Of the order and the augmentation.
    workers : int
        Processes that read; 0 reads in this one.
    device : str
        On which batches are normalised and yielded.
    mean, std : tuple of float
        By channel, on the scale 0 … 1.

    Raises
    ------
    DataError
        If the folder is missing or holds no images.
    """

    def __init__(
        self,
        root,
        *,
        batch_size,
        chosen=None,
        size=224,
        resize=None,
        interpolation="bilinear",
        seed=0,
        workers=4,
        device="cpu",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ):
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        try:
            folder = root if hasattr(root, "samples") else ImageFolder(root)
        except OSError as error:
            raise DataError(f"{root} cannot be read ({error}): expected a folder of images for each class") from error
        self.chosen = torch.arange(len(folder)) if chosen is None else torch.as_tensor(chosen)
        self.device, self.seed = torch.device(device), seed
        self.batch_size = min(batch_size, len(self.chosen))
        self.labels = torch.tensor(folder.targets)[self.chosen].to(self.device)
        self.normalise = Normalise(mean, std, self.device)
        self.workers = workers
        mode = v2.InterpolationMode(interpolation)
        crop, whole = v2.RandomResizedCrop(size, interpolation=mode), v2.Resize(resize or round(size * 8 / 7), mode)
        self.augmented = Images(folder, v2.Compose([crop, v2.RandomHorizontalFlip()]), seed)
        self.centred = Images(folder, v2.Compose([whole, v2.CenterCrop(size)]), seed)

    def __len__(self) -> int:
        return len(self.chosen) // self.batch_size

    def order(self, epoch: int, start: int = 0):
        """Yield the indices [B], into ``labels``, of the batches of one epoch from batch ``start`` on."""
        order = torch.randperm(len(self.chosen), generator=stream(self.seed, "order", epoch))
        mine = share(self.batch_size)
        for step in range(start, len(self)):
            yield order[step * self.batch_size : (step + 1) * self.batch_size][mine]

    def epoch(self, epoch: int, start: int = 0, view: int = 0):
        """Yield the batches of one epoch from batch ``start`` on: images float32 [B, C, H, W] and labels [B].

        Each ``view`` crops and flips the same images in another way.
        """
        batches = [
            [(epoch, index, view) for index in self.chosen[batch].tolist()] for batch in self.order(epoch, start)
        ]
        yield from self.read(self.augmented, batches)

    def in_order(self):
        """Yield every image once, not augmented, in the order of ``labels``."""
        batches = [[(0, index, 0) for index in batch.tolist()] for batch in self.chosen.split(self.batch_size)]
        for images, _ in self.read(self.centred, batches):
            yield images

    def read(self, images: Images, batches: list[list[tuple[int, int, int]]]):
        """Read, normalise and yield batches of positions."""
        reader = DataLoader(
            images,
            batch_sampler=batches,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=ignore_interrupts,
            generator=torch.Generator(),  # else it would draw its workers' seeds from the run's stream
        )
        for pixels, labels in reader:
            yield self.normalise(pixels.to(self.device, non_blocking=True)), labels.to(self.device, non_blocking=True)


def ignore_interrupts(worker: int) -> None:
    """Leave Ctrl-C, which the terminal sends to every process, to the one that saves and stops its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
