"""Made-up files in the layouts of public data sets: tiny pictures and a few questions each."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

from PIL import Image


def picture(color: str = "red", size: tuple[int, int] = (32, 24), kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, kind)
    return buffer.getvalue()


def put(path: Path, content: Any) -> Path:
    """Writes bytes as they are, text as UTF-8 and everything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def put_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Two rows a group, so that reading has to find the right group."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def make_vqav2(folder: Path) -> None:
    put(folder / "val2014/COCO_val2014_000000000042.jpg", picture())
    put(folder / "val2014/COCO_val2014_000000000043.jpg", picture("blue"))
    rows = [
        (42000, 42, "Is it red?", ["yes"] * 9 + ["no"], "yes/no"),
        (42001, 42, "How many?", ["two"] * 4 + ["2"] * 4 + ["3"] * 2, "number"),
        (43000, 43, "What colour?", ["blue"] * 7 + ["navy"] * 3, "other"),
    ]
    put(
        folder / "v2_OpenEnded_mscoco_val2014_questions.json",
        {
            "questions": [
                {"question_id": key, "image_id": image, "question": text}
                for key, image, text, _, _ in rows
            ]
        },
    )
    put(
        folder / "annotations/v2_mscoco_val2014_annotations.json",
        {
            "annotations": [
                {
                    "question_id": key,
                    "image_id": image,
                    "question_type": "what",
                    "answer_type": kind,
                    "multiple_choice_answer": answers[0],
                    "answers": [
                        {"answer": answer, "answer_confidence": "yes", "answer_id": number}
                        for number, answer in enumerate(answers, start=1)
                    ],
                }
                for key, image, _, answers, kind in reversed(rows)
            ]
        },
    )


def make_textvqa(folder: Path) -> None:
    put(folder / "train_images/a1b2.jpg", picture())
    put(
        folder / "TextVQA_0.5.1_val.json",
        {
            "dataset_type": "val",
            "data": [
                {
                    "question_id": 34602,
                    "question": "what is the brand of this camera?",
                    "image_id": "a1b2",
                    "answers": ["nous les gosses", *["dakota"] * 8, "dakota digital"],
                }
            ],
        },
    )


def make_docvqa(folder: Path) -> None:
    put(folder / "spdocvqa_images/ffbf0023_4.png", picture(kind="PNG"))
    put(
        folder / "spdocvqa_qas/val_v1.0_withQT.json",
        {
            "data": [
                {
                    "questionId": 49153,
                    "question": "What is the „actual“ value per 1000?",
                    "question_types": ["figure/diagram", "table/list"],
                    "image": "documents/ffbf0023_4.png",
                    "docId": 14465,
                    "answers": ["0.28", "0,28"],
                }
            ]
        },
    )


def make_chartqa(folder: Path) -> None:
    put(folder / "test/png/41699051005347.png", picture(kind="PNG"))
    put(folder / "test/png/two_col_1.png", picture("green", kind="PNG"))
    put(
        folder / "test/test_human.json",
        [{"imgname": "41699051005347.png", "query": "How many bars?", "label": "14"}],
    )
    put(
        folder / "test/test_augmented.json",
        [{"imgname": "two_col_1.png", "query": "What was the share?", "label": "57.5%"}],
    )


def make_pope(folder: Path) -> None:
    put(folder / "val2014/COCO_val2014_000000310196.jpg", picture())
    for kind in ("random", "popular", "adversarial"):
        rows = [
            {
                "question_id": number,
                "image": "COCO_val2014_000000310196.jpg",
                "text": f"Is there a {thing} in the image?",
                "label": label,
            }
            for number, (thing, label) in enumerate((("snowboard", "yes"), ("car", "no")), start=1)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        put(folder / f"output/coco/coco_pope_{kind}.json", lines)


def make_mme(folder: Path) -> None:
    from eval.tasks.mme import COGNITION, PERCEPTION

    for number, subtask in enumerate((*PERCEPTION, *COGNITION)):
        root = folder / "MME_Benchmark_release_version" / subtask
        text = (
            "Is this red? Please answer yes or no.\tYes\r\n"
            "Is this blue? Please answer yes or no.\tNo\r\n"
        )
        # Both layouts of the release: folders of their own, and side by side.
        in_folders = number % 2 == 0
        put(root / ("images/0001.jpg" if in_folders else "0001.png"), picture())
        put(root / ("questions_answers_YN/0001.txt" if in_folders else "0001.txt"), text)


def make_mmbench(folder: Path) -> None:
    first = base64.b64encode(picture()).decode()
    columns = [
        *("index", "question", "hint", "A", "B", "C", "D"),
        *("answer", "category", "image", "l2-category", "split"),
    ]
    rows = [
        ["7", "Which fruit?", "nan", "apple", "pear", "nan", "nan", "A", "identity", first, "l2"],
        ["1000007", "Which fruit?", "", "pear", "apple", "", "", "B", "identity", "7", "l2"],
        ["8", '"Two\nlines?"', "a hint", "x", "y", "z", "w", "D", "scene", first, "l2"],
    ]
    lines = ["\t".join(columns)] + ["\t".join([*row, "dev"]) for row in rows]
    put(folder / "MMBench_DEV_EN.tsv", "\n".join(lines) + "\n")


def _mmmu_rows(as_picture: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": "validation_Accounting_1",
            "question": "See <image 1>. What is in <image 1> and <image 2>?",
            "options": "['$6', '$7', '$8 <image 3>']",
            "answer": "B",
            "question_type": "multiple-choice",
            "image_1": as_picture("red"),
            "image_2": as_picture("blue"),
            "image_3": as_picture("green"),
        },
        {
            "id": "validation_Physics_2",
            "question": "<image 1> How much?",
            "options": "[]",
            "answer": "['24/7', '3.429']",
            "question_type": "open",
            "image_1": as_picture("red"),
            "image_2": None,
            "image_3": None,
        },
        {
            "id": "validation_Art_3",
            "question": "Who painted <image 1>?",
            "options": "['Monet', 'Manet']",
            "answer": "A",
            "question_type": "multiple-choice",
            "image_1": as_picture("yellow"),
            "image_2": None,
            "image_3": None,
        },
    ]


def make_mmmu(folder: Path) -> None:
    rows = _mmmu_rows(lambda color: {"bytes": picture(color, kind="PNG"), "path": f"{color}.png"})
    for row in rows:
        subject = row["id"].split("_")[1]
        put_parquet(folder / subject / "validation-00000-of-00001.parquet", [row])


def make_mmmu_json(folder: Path) -> None:
    for color in ("red", "blue", "green", "yellow"):
        put(folder / f"images/{color}.png", picture(color, kind="PNG"))
    put(folder / "validation.json", _mmmu_rows(lambda color: f"{color}.png"))


def make_scienceqa(folder: Path) -> None:
    put(folder / "images/test/4/image.png", picture(kind="PNG"))
    problems = {
        "4": {
            "question": "Which of these is a solid?",
            "choices": ["water", "rock", "air"],
            "answer": 1,
            "hint": "",
            "image": "image.png",
            "grade": "grade3",
            "subject": "natural science",
            "split": "test",
        },
        "5": {
            "question": "Which word?",
            "choices": ["here", "there"],
            "answer": 0,
            "hint": "Read the text.",
            "image": None,
            "grade": "grade8",
            "subject": "language science",
            "split": "test",
        },
        "6": {"split": "train"},
    }
    put(folder / "problems.json", problems)
    put(folder / "pid_splits.json", {"train": ["6"], "test": ["4", "5"]})


def make_ai2d(folder: Path) -> None:
    put(folder / "ai2d_test_ids.csv", "12\n")
    put(folder / "images/12.png", picture("gray", kind="PNG"))
    put(
        folder / "questions/12.png.json",
        {
            "imageName": "12.png",
            "questions": {
                "What is at the top?": {
                    "abcLabel": False,
                    "answerTexts": ["leaf", "root", "stem", "soil"],
                    "correctAnswer": 2,
                    "questionId": "12.png-0",
                },
                "Which letter is the root?": {
                    "abcLabel": True,
                    "answerTexts": ["A", "B", "C", "D"],
                    "correctAnswer": 1,
                    "questionId": "12.png-1",
                },
            },
        },
    )
    put(
        folder / "annotations/12.png.json",
        {"text": {"T0": {"rectangle": [[2, 2], [14, 12]], "replacementText": "B"}}},
    )


def make_gqa(folder: Path) -> None:
    make_whole_gqa(folder)
    for name in ("questions1.2/testdev_all_questions.json", "eval/testdev_choices.json"):
        (folder / name).unlink()


def make_whole_gqa(folder: Path, split: str = "testdev") -> None:
    """Two balanced questions, of which the first entails the second and one that is not balanced;
    with the answers that are valid and plausible."""
    put(folder / "images/n161313.jpg", picture())
    put(folder / "images/n235859.jpg", picture("blue"))
    balanced = {
        "201307251": {
            "question": "Is it overcast?",
            "imageId": "n161313",
            "answer": "no",
            "isBalanced": True,
            "types": {"structural": "verify", "semantic": "global", "detailed": "weather"},
            "groups": {"global": None, "local": "10-weather"},
            "entailed": ["201307251", "201307252", "201640614"],
        },
        "201640614": {
            "question": "Who is wearing the shirt?",
            "imageId": "n235859",
            "answer": "t-shirt girl",
            "isBalanced": True,
            "types": {"structural": "query", "semantic": "rel", "detailed": "relS"},
            "groups": {"global": "person", "local": "14-shirt_wearing"},
            "entailed": [],
        },
    }
    other = {
        "question": "Is it cloudless?",
        "imageId": "n161313",
        "answer": "yes",
        "isBalanced": False,
        "types": {"structural": "verify", "semantic": "global", "detailed": "weather"},
        "entailed": ["201307251"],
    }
    choices = {
        "201307251": {"valid": ["yes", "no"], "plausible": ["yes", "no"]},
        "201640614": {"valid": ["girl", "T-shirt girl", "boy"], "plausible": ["girl"]},
    }
    questions = folder / "questions1.2"
    put(questions / f"{split}_balanced_questions.json", balanced)
    put(questions / f"{split}_all_questions.json", {**balanced, "201307252": other})
    put(folder / "eval" / f"{split}_choices.json", choices)


BOX = [8.0, 6.0, 16.0, 12.0]  # of a picture of 32 x 24: the middle half


def make_refcoco_mdetr(folder: Path) -> None:
    put(folder / "train2014/COCO_train2014_000000000001.jpg", picture())
    put(
        folder / "finetune_refcoco_testA.json",
        {
            "images": [
                {
                    "id": 5,
                    "file_name": "COCO_train2014_000000000001.jpg",
                    "caption": "the red one",
                    "width": 32,
                    "height": 24,
                }
            ],
            "annotations": [{"id": 9, "image_id": 5, "bbox": BOX}],
        },
    )


def make_refcoco_pickle(folder: Path) -> None:
    name = "COCO_train2014_000000000001.jpg"
    put(folder / "images/mscoco/images/train2014" / name, picture())
    references = [
        {
            "ref_id": number,
            "ann_id": 9,
            "image_id": 1,
            "split": split,
            "sentences": [{"sent_id": 10 + number, "sent": "the red one", "tokens": ["the"]}],
        }
        for number, split in enumerate(("train", "testA"))
    ]
    put(folder / "refcoco/refs(unc).p", pickle.dumps(references, protocol=2))
    put(
        folder / "refcoco/instances.json",
        {
            "images": [{"id": 1, "file_name": name, "width": 32, "height": 24}],
            "annotations": [{"id": 9, "image_id": 1, "bbox": BOX}],
        },
    )


MAKERS = {
    "vqav2": make_vqav2,
    "textvqa": make_textvqa,
    "docvqa": make_docvqa,
    "chartqa": make_chartqa,
    "pope": make_pope,
    "mme": make_mme,
    "mmbench": make_mmbench,
    "mmmu": make_mmmu,
    "scienceqa": make_scienceqa,
    "ai2d": make_ai2d,
    "gqa": make_gqa,
    "refcoco_testA": make_refcoco_mdetr,
}
"""Task name -> writes its files into a folder."""
OTHER_LAYOUTS = [("mmmu", make_mmmu_json), ("refcoco_testA", make_refcoco_pickle)]
"""Other places of the same files."""
