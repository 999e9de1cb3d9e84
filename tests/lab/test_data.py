"""Data sets: what is read is what was written, and what is missing or damaged is said."""

import functools
import hashlib
import http.server
import importlib.machinery
import io
import pickle
import sys
import tarfile
import threading
import types
import warnings
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

pytest.importorskip("timm")

from class_folders import brightness, jpeg, write_folder, write_tar
from PIL import Image

from ripple_lab.data import cifar100, folders
from ripple_lab.data.cifar100 import load_cifar100
from ripple_lab.data.digits import load_digits_images
from ripple_lab.data.folders import (
    SkipDamaged,
    check_same_classes,
    open_folder,
)
from ripple_lab.data.images import DataError
from ripple_lab.data.loaders import SeededBatches, TrainBatches
from ripple_lab.data.module import open_data
from ripple_lab.data.synthetic import synthetic_images
from ripple_lab.recipes import find_recipe

COUNTS = {"train": 7, "test": 5}
WHOLE_NAMES = "\n".join(f"name_{label}" for label in range(100)) + "\n"


def cifar_files():
    """The binary files of a small CIFAR-100, and the images and labels that are in them."""
    generator = torch.Generator().manual_seed(0)
    files, truth = {"fine_label_names.txt": WHOLE_NAMES.encode()}, {}
    for split, count in COUNTS.items():
        shape = (count, 3, 32, 32)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 100, (count,), generator=generator)
        labels[0] = 99
        records = [
            bytes([label % 20, label]) + image.numpy().tobytes()
            for image, label in zip(images, labels.tolist(), strict=True)
        ]
        files[f"{split}.bin"] = b"".join(records)
        truth[split] = images, labels
    return files, truth


@pytest.fixture
def small(monkeypatch):
    """CIFAR-100 may have a few images."""
    monkeypatch.setattr(cifar100, "RECORDS", COUNTS)


@pytest.fixture
def unpacked(tmp_path, small):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, content in cifar_files()[0].items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def archive(tmp_path, small, monkeypatch):
    """A whole archive in a folder of its own."""
    path = tmp_path / "there" / "cifar-100-binary.tar.gz"
    path.parent.mkdir()
    files = {f"cifar-100-binary/{name}": content for name, content in cifar_files()[0].items()}
    write_tar(path, files, "w:gz")
    accept(monkeypatch, path)
    return path


def accept(monkeypatch, path):
    monkeypatch.setattr(cifar100, "MD5", hashlib.md5(path.read_bytes()).hexdigest())


@pytest.fixture
def server(archive, monkeypatch):
    """Serves the folder of the archive."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(archive.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(
            cifar100, "URL", f"http://127.0.0.1:{running.server_port}/{archive.name}"
        )
        yield running
        running.shutdown()


@pytest.mark.parametrize("split", COUNTS)
@pytest.mark.parametrize("given", ["parent", "folder"])
def test_cifar_gives_back_the_images_and_fine_labels_that_were_written(unpacked, split, given):
    images, labels = cifar_files()[1][split]
    data = load_cifar100(unpacked if given == "folder" else unpacked.parent, split == "train")
    assert torch.equal(data.images, images) and data.images.dtype == torch.uint8
    assert torch.equal(data.labels, labels) and data.labels.dtype == torch.int64
    assert data.images.is_contiguous()
    assert data.classes == tuple(WHOLE_NAMES.split())
    picture, label = data[1]
    assert picture.getpixel((3, 2)) == tuple(images[1, :, 2, 3].tolist())
    assert label == labels[1]


def test_the_official_counts_are_demanded():
    assert cifar100.RECORDS == {"train": 50_000, "test": 10_000}


def test_missing_cifar_says_where_it_was_looked_for_and_how_to_get_it(tmp_path):
    with pytest.raises(DataError) as error:
        load_cifar100(tmp_path / "nowhere", train=False)
    message = str(error.value)
    assert str(tmp_path / "nowhere" / "cifar-100-binary" / "test.bin") in message
    assert "unpack cifar-100-binary.tar.gz there, or pass --data.download" in message
    assert "\n" not in message
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("change", [-1, 1, -3074, 3074])
def test_a_file_of_another_length_is_refused(unpacked, change):
    path = unpacked / "train.bin"
    path.write_bytes((path.read_bytes() + bytes(max(change, 0)))[: 7 * 3074 + change])
    with pytest.raises(DataError, match=r"train\.bin has .* bytes; 7 records.*: remove it"):
        load_cifar100(unpacked, train=True)
    assert len(load_cifar100(unpacked, train=False)) == COUNTS["test"]


def test_a_label_out_of_range_is_refused(unpacked):
    content = bytearray((unpacked / "test.bin").read_bytes())
    content[2 * 3074 + 1] = 100
    (unpacked / "test.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"test\.bin has a label 100; they go to 99: remove it"):
        load_cifar100(unpacked, train=False)


def test_names_must_be_there_and_be_a_hundred(unpacked):
    names = unpacked / "fine_label_names.txt"
    names.write_text("apple\nbaby\n")
    with pytest.raises(DataError, match=r"fine_label_names\.txt has 2 names for 100 classes"):
        load_cifar100(unpacked, train=True)
    names.unlink()
    with pytest.raises(DataError, match=r"missing, .*fine_label_names\.txt: remove it"):
        load_cifar100(unpacked, train=True)


def test_an_incomplete_folder_is_named(unpacked):
    (unpacked / "train.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-100-binary has no train\.bin: remove it"):
        load_cifar100(unpacked.parent, train=True, download=True)


def test_an_archive_is_unpacked_beside_itself(archive):
    data = load_cifar100(archive.parent, train=True)
    assert torch.equal(data.images, cifar_files()[1]["train"][0])
    assert {p.name for p in archive.parent.iterdir()} == {archive.name, "cifar-100-binary"}


def test_an_interrupted_extraction_leaves_nothing_half_done(archive, monkeypatch):
    def interrupted(tar, path, **options):
        tar.extract("cifar-100-binary/train.bin", path, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extractall", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_cifar100(archive.parent, train=True)
    assert [p.name for p in archive.parent.iterdir()] == [archive.name]
    assert len(load_cifar100(archive.parent, train=True)) == COUNTS["train"]


def test_another_process_may_unpack_at_the_same_time(archive, monkeypatch):
    extract = tarfile.TarFile.extractall

    def slower(tar, path, **options):
        extract(tar, path, **options)
        extract(tar, archive.parent, **options)

    monkeypatch.setattr(tarfile.TarFile, "extractall", slower)
    assert len(load_cifar100(archive.parent, train=True)) == COUNTS["train"]


def test_a_damaged_archive_is_named(archive, monkeypatch):
    archive.write_bytes(archive.read_bytes()[:9000])
    with pytest.raises(DataError, match=r"tar\.gz is not whole: .*: remove it and fetch it again"):
        load_cifar100(archive.parent, train=True)
    accept(monkeypatch, archive)
    with pytest.raises(DataError, match=r"tar\.gz cannot be unpacked .*remove it and fetch it"):
        load_cifar100(archive.parent, train=True)
    assert [p.name for p in archive.parent.iterdir()] == [archive.name]


def test_an_archive_that_leaves_its_folder_is_refused(archive, monkeypatch):
    write_tar(archive, {"cifar-100-binary/a": b"", "../../outside": b"x"}, "w:gz")
    accept(monkeypatch, archive)
    with pytest.raises(DataError, match=r"cannot be unpacked .*outside"):
        load_cifar100(archive.parent, train=True)
    assert not list(archive.parent.parent.rglob("outside"))


def test_cifar_is_downloaded_once(server, archive, tmp_path, capsys):
    root = tmp_path / "new" / "data"
    data = load_cifar100(root, train=True, download=True)
    assert torch.equal(data.images, cifar_files()[1]["train"][0])
    assert {p.name for p in root.iterdir()} == {archive.name, "cifar-100-binary"}
    assert archive.name in capsys.readouterr().err  # the progress bar
    server.shutdown()
    assert len(load_cifar100(root, train=False, download=True)) == COUNTS["test"]


def test_a_download_of_the_wrong_checksum_is_thrown_away(server, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar100, "MD5", "0" * 32)
    with pytest.raises(DataError, match=r"http.* is not whole: its md5 is \w{32}, not 0{32}: try"):
        load_cifar100(tmp_path / "new", train=True, download=True)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_download_that_fails_says_how_to_do_without(server, archive, tmp_path):
    archive.unlink()
    with pytest.raises(DataError, match=r"could not be fetched .*404.*put cifar-100-binary.tar.gz"):
        load_cifar100(tmp_path / "new", train=True, download=True)
    assert list((tmp_path / "new").iterdir()) == []


def test_digits_are_grey_pictures_split_in_proportion():
    train, test = load_digits_images(True), load_digits_images(False)
    assert train.images.shape == (1437, 3, 32, 32) and test.images.shape == (360, 3, 32, 32)
    for data in (train, test):
        assert data.images.dtype == torch.uint8 and data.labels.dtype == torch.int64
        assert data.images.min() == 0 and data.images.max() == 255
        assert torch.equal(data.images[:, 0], data.images[:, 2])
        assert data.classes == tuple("0123456789")
    shares = train.labels.bincount() / len(train), test.labels.bincount() / len(test)
    assert (shares[0] - shares[1]).abs().max() < 0.003


def test_every_digit_is_in_one_split_with_its_label():
    from sklearn.datasets import load_digits

    original = load_digits()
    splits = [load_digits_images(train) for train in (True, False)]
    enlarged = torch.cat([data.images[:, :1] for data in splits]).float()
    middles = F.avg_pool2d(enlarged[..., 1:31, 1:31], 2, stride=4)  # of the enlarged pixels
    small = middles.flatten(1) * (16 / 255)
    nearest = torch.cdist(small, torch.from_numpy(original.data).float()).argmin(1)
    assert nearest.sort().values.tolist() == list(range(len(original.target)))
    labels = torch.cat([data.labels for data in splits])
    assert labels.tolist() == original.target[nearest].tolist()


def test_the_digits_of_a_split_are_always_the_same():
    first, again = load_digits_images(False), load_digits_images(False)
    assert torch.equal(first.images, again.images) and torch.equal(first.labels, again.labels)


def test_made_up_images_follow_from_the_seed_and_go_round_the_classes():
    first, again, other = (synthetic_images(7, 16, 3, seed) for seed in (0, 0, 1))
    assert first.images.shape == (7, 3, 16, 16) and first.images.dtype == torch.uint8
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert first.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert first.classes == ("class 0", "class 1", "class 2")


def class_files(per_class=3, classes=("n10", "n2")):
    """Content by path; the grey of an image is 40 × the number of its class + its own number."""
    return {
        f"{name}/image{i}.JPEG": jpeg(40 * number + i)
        for number, name in enumerate(classes, 1)
        for i in range(per_class)
    }


def nested_tars(path, files):
    """A tar of one tar for each class, as ImageNet comes."""
    classes = {}
    for name, content in files.items():
        folder, image = name.split("/")
        classes.setdefault(folder, {})[image] = content
    tars = {}
    for folder, images in classes.items():
        write_tar(path.with_suffix(".inner"), images)
        tars[f"{folder}.tar"] = path.with_suffix(".inner").read_bytes()
    path.with_suffix(".inner").unlink()
    write_tar(path, tars)


@pytest.mark.parametrize("evaluation", ["val", "validation", "test"])
@pytest.mark.parametrize("kind", ["folders", "tar", "tar of tars"])
def test_class_folders_and_tars_give_pictures_and_labels(tmp_path, kind, evaluation):
    for split in ("train", evaluation):
        if kind == "folders":
            write_folder(tmp_path / split, class_files())
        else:
            write = write_tar if kind == "tar" else nested_tars
            write(tmp_path / f"{split}.tar", class_files())
    splits = [open_folder("", str(tmp_path), train, False) for train in (True, False)]
    check_same_classes(*splits)
    for data in splits:
        assert data.classes == ("n2", "n10")
        assert len(data) == 6
        for i in range(6):
            picture, label = data[i]
            assert picture.mode == "RGB" and picture.size == (40, 30)
            assert picture.getpixel((0, 0))[0] // 40 == {"n10": 1, "n2": 2}[data.classes[label]]


def test_a_tar_that_was_read_before_is_read_by_worker_processes(tmp_path):
    write_tar(tmp_path / "train.tar", class_files(per_class=20))
    data = SkipDamaged(open_folder("", str(tmp_path), True, False), brightness, train=True)
    expected = read_all(data)
    assert read_by_workers(data) == expected
    assert data.damaged == 0
    # No open file, whose position processes would share, goes with it.
    assert read_all(pickle.loads(ForkingPickler.dumps(data))) == expected


def test_the_order_of_classes_is_no_matter_of_chance(tmp_path):
    names = "bBcCaAdDeEfFGgHh"
    files = {f"{name}/1.jpg": jpeg(15 * i) for i, name in enumerate(names)}
    write_tar(tmp_path / "train.tar", files)  # a folder might not tell A from a
    data = open_folder("", str(tmp_path), True, False)
    assert data.classes == tuple("AaBbCcDdEeFfGgHh")
    for picture, label in read_all(data):
        assert names[round(brightness(picture) / 15)] == data.classes[label]


def test_missing_folders_say_where_and_in_which_layout(tmp_path):
    with pytest.raises(DataError) as error:
        open_folder("", str(tmp_path), False, False)
    message = str(error.value)
    assert f"evaluation images were looked for in {tmp_path}" in message
    assert f"{tmp_path / 'val'}/<class>/<image>.jpg" in message
    assert "\n" not in message
    with pytest.raises(DataError, match="training images"):
        open_folder("", str(tmp_path), True, False)


def test_folders_and_tars_without_images_say_what_is_expected(tmp_path):
    (tmp_path / "train" / "n1").mkdir(parents=True)
    write_tar(tmp_path / "val.tar", {"n1/notes.txt": b"no image"})
    for train in (True, False):
        with pytest.raises(DataError, match=r"no images were found in .*expected is .*<class>"):
            open_folder("", str(tmp_path), train, False)
    (tmp_path / "val.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(DataError, match=r"val\.tar \("):
        open_folder("", str(tmp_path), False, False)


def test_images_in_no_class_folder_are_refused(tmp_path):
    write_folder(tmp_path / "val", {"ILSVRC2012_val_1.JPEG": jpeg(1)})
    write_tar(tmp_path / "train.tar", {"./1.JPEG": jpeg(1)})
    for train in (True, False):
        with pytest.raises(DataError, match="in no class folder"):
            open_folder("", str(tmp_path), train, False)


def test_splits_of_different_classes_are_refused(tmp_path):
    write_folder(tmp_path / "train", class_files(1, ("a", "b", "c")))
    write_folder(tmp_path / "val", class_files(1, ("a", "c", "d")))
    train, evaluation = (open_folder("", str(tmp_path), train, False) for train in (True, False))
    with pytest.raises(DataError, match=r"1 are only in training \(b\), 1 only in .* \(d\)"):
        check_same_classes(train, evaluation)


@pytest.mark.parametrize("source", ["wds/x", "tfds/imagenet2012", "hfids/x", "imagenet"])
def test_streams_and_unknown_sources_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match='source must be "", "hfds/'):
        open_folder(source, str(tmp_path), True, False)


def test_torchvision_data_sets_are_read_in_rgb(tmp_path, monkeypatch):
    from timm.data import dataset_factory

    with pytest.raises(DataError, match=r"torch/mnist could not be opened in .*data.download"):
        open_folder("torch/mnist", str(tmp_path), True, False)

    class Grey:
        classes = ("0 - zero", ("one", "uno"))

        def __init__(self, root, train, download):
            self.train = train

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return Image.new("L", (4, 4), 9), int(self.train)

    monkeypatch.setitem(dataset_factory._TORCH_BASIC_DS, "mnist", Grey)
    for train in (True, False):
        data = open_folder("torch/mnist", str(tmp_path), train, False)
        picture, label = data[0]
        assert picture.getpixel((0, 0)) == (9, 9, 9) and label == train
        assert data.classes == ("0 - zero", "one, uno")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for Hugging Face's `datasets`, with one data set."""
    items = [{"image": {"bytes": jpeg(9), "path": "a.jpg"}, "label": 1}]

    class Label:
        names = ("tench", "goldfish")
        str2int = names.index

    class Table(list):
        info = types.SimpleNamespace(
            features={"label": Label},
            splits={s: types.SimpleNamespace(num_examples=1) for s in ("train", "test")},
        )

        def cast_column(self, *_):
            return self

    def load_dataset(name, split, **_):
        if name != "tiny/set":
            raise ConnectionError(f"cannot reach {name}\nat all")
        if split not in Table.info.splits:
            raise ValueError(f'Unknown split "{split}". Should be one of [train, test].')
        return Table(items)

    module = types.ModuleType("datasets")
    module.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    module.load_dataset, module.Image = load_dataset, lambda decode: None
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    yield Table
    sys.modules.pop("timm.data.readers.reader_hfds", None)


def test_the_hub_gives_pictures_labels_and_names(hub, tmp_path):
    for train in (True, False):
        data = open_folder("hfds/tiny/set", str(tmp_path), train, False)
        picture, label = data[0]
        assert picture.getpixel((0, 0))[0] == 9 and label == 1
        assert data.classes == ("tench", "goldfish")
        assert data.filename(0) == "a.jpg"


def test_a_hub_without_the_data_set_or_the_split_is_one_line(hub, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"^hfds/other could .*\(cannot reach other\).*name is ri"):
        open_folder("hfds/other", str(tmp_path), True, False)
    monkeypatch.delitem(hub.info.splits, "test")
    with pytest.raises(DataError, match=r"Unknown split \"test\""):
        open_folder("hfds/tiny/set", str(tmp_path), False, False)


def test_the_hub_without_its_package_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(folders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install datasets"):
        open_folder("hfds/tiny/set", str(tmp_path), True, False)


def read_all(data):
    return [data[i] for i in range(len(data))]


def read_by_workers(data):
    batches = DataLoader(data, batch_size=2, num_workers=2)
    return [item for x, y in batches for item in zip(x.tolist(), y.tolist(), strict=True)]


def noisy_jpeg():
    file = io.BytesIO()
    synthetic_images(1, 64, 1, seed=0)[0][0].save(file, "JPEG")
    return file.getvalue()


DAMAGED = {
    "n2/image3.jpg": noisy_jpeg()[:-900],
    "n2/image4.jpg": b"",
    "n2/image5.jpg": b"this is no image\n" * 50,
}


@pytest.fixture
def partly_damaged(tmp_path):
    """Nine images in order of their names; 6, 7 and 8 are damaged."""
    write_folder(tmp_path / "train", class_files() | DAMAGED)
    return open_folder("", str(tmp_path), True, False)


def test_every_kind_of_damage_is_warned_of_by_name(partly_damaged):
    data = SkipDamaged(partly_damaged, brightness, train=False)
    for index, name in enumerate(("image3.jpg", "image4.jpg", "image5.jpg")):
        with pytest.warns(UserWarning, match=rf"train/n2/{name} cannot be decoded, it is left out"):
            assert data[data_index(partly_damaged, name)] == (0, -1)
        assert data.damaged == index + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("image3.jpg", "image4.jpg", "image0.JPEG"):
            data[data_index(partly_damaged, name)]
    assert data.damaged == 3
    assert data.classes == ("n2", "n10") and len(data) == 9


def data_index(data, name):
    return next(i for i in range(len(data)) if data.filename(i).endswith(name))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_worker_processes_skip_and_count_damaged_images(partly_damaged, train):
    data = SkipDamaged(partly_damaged, brightness, train)
    bad = {data_index(partly_damaged, name.split("/")[1]) for name in DAMAGED}
    for _ in range(2):  # a second epoch counts none of them again
        items = read_by_workers(data)
        for index, item in enumerate(items):
            if train:
                index = next(i % 9 for i in range(index, index + 9) if i % 9 not in bad)
            if index in bad:
                assert item == (0, -1)
            else:
                picture, label = partly_damaged[index]
                assert item == (brightness(picture), label)
        assert len(items) == 9
        assert data.damaged == 3


@pytest.mark.filterwarnings("ignore")
def test_the_count_is_shared_with_processes_that_are_spawned(partly_damaged):
    data = SkipDamaged(partly_damaged, brightness, train=False)
    there = pickle.loads(ForkingPickler.dumps(data))  # as a spawned worker receives it
    assert there[data_index(partly_damaged, "image4.jpg")] == (0, -1)
    assert data.damaged == 1


@pytest.mark.parametrize("train", [True, False])
def test_only_the_first_damaged_images_are_named(tmp_path, train, monkeypatch):
    monkeypatch.setattr(folders, "NAMED", 2)
    bad = {f"a/{i}.jpg": b"" for i in range(5)}
    write_folder(tmp_path / "train", bad | {"b/good.jpg": jpeg(1)})
    data = SkipDamaged(open_folder("", str(tmp_path), True, False), brightness, train)
    with pytest.warns(UserWarning, match="cannot be decoded") as caught:
        read_all(data)
    assert len(caught) == 2
    assert "only counted" in str(caught[-1].message)
    assert data.damaged == 5


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_nothing_but_damaged_images_is_an_error(tmp_path, train, monkeypatch):
    monkeypatch.setattr(folders, "IN_A_ROW", 4)
    write_folder(tmp_path / "train", {f"a/{i}.jpg": b"" for i in range(6)} | {"b/9.jpg": jpeg(1)})
    data = SkipDamaged(open_folder("", str(tmp_path), True, False), brightness, train)
    with pytest.raises(DataError, match=r"4 images in a row .*a/3\.jpg"):
        read_all(data)


def test_an_error_of_the_transform_is_no_damage(partly_damaged):
    def broken(picture):
        raise ValueError("the transform is wrong")

    data = SkipDamaged(partly_damaged, broken, train=True)
    with pytest.raises(ValueError, match="the transform is wrong"):
        data[0]
    assert data.damaged == 0


def test_what_timm_would_replace_in_silence_is_left_out_of_an_evaluation(partly_damaged):
    index = data_index(partly_damaged, "image4.jpg")
    with pytest.raises(OSError, match="cannot identify"):
        partly_damaged[index]


def test_images_in_memory_can_be_read_image_by_image():
    data = SkipDamaged(synthetic_images(4, 8, 2, seed=0), brightness, train=True)
    assert [data[i][1] for i in range(4)] == [0, 1, 0, 1]
    assert data.classes == ("class 0", "class 1")
    assert data[0][0] == data.dataset.images[0, 0, 0, 0]


def test_a_limit_takes_the_first_training_images_and_all_of_the_evaluation(unpacked):
    recipe = find_recipe("cifar100-short-ripple-tiny4")
    data = replace(recipe.data, root=str(unpacked), limit=4)
    limited = [len(open_data(replace(recipe, data=data), train, 32)) for train in (True, False)]
    data = replace(data, limit=None)
    whole = [len(open_data(replace(recipe, data=data), train, 32)) for train in (True, False)]
    assert limited == [4, COUNTS["test"]] and whole == [COUNTS["train"], COUNTS["test"]]


def test_repeated_augmentation_shows_fewer_images_each_with_draws_of_its_own():
    once, thrice = (TrainBatches(20, 6, seed=1, repeats=repeats) for repeats in (1, 3))
    assert once.order(0).shape == thrice.order(0).shape == (3, 6)
    assert len(once.order(0).unique()) == 18
    assert thrice.order(0).unique(return_counts=True)[1].tolist() == [3] * 6
    items = [item for batch in SeededBatches(thrice) for item in batch]
    assert len(set(items)) == len({seed for _, seed in items}) == 18
    first, second = (TrainBatches(20, 6, 1, rank=rank, world=2, repeats=3) for rank in (0, 1))
    assert torch.equal(torch.cat([first.order(0), second.order(0)], 1), thrice.order(0))
