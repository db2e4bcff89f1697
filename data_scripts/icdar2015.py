"""ICDAR 2015 Incidental Scene Text, task 4.3: cropped words, annotated in lines of file, "word".

--source: gt.txt of the training images or Challenge4_Test_Task3_GT.txt of the test images.
--images: the folder of the word images.
"""

import re

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_text
from vlm_grpo.errors import UserError

_LINE = re.compile(r'([^\s,]+),\s*"(.*)"\s*')
_FILES = {"test": "*Test_Task3_GT.txt", "train": "gt.txt"}


@converter(tasks=("ocr",), splits={"test": 2_077, "train": 4_468})
def convert(request: Request) -> Rows:
    path = request.find_file(_FILES[request.split])
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        if (match := _LINE.fullmatch(line)) is None:
            raise UserError(f"{path}:{number} is corrupt or truncated: {line[:80]!r}")
        image, word = match[1], match[2].replace('\\"', '"')
        question = "What is the text in the image?"
        yield ConvertedRow(f"{request.split}-{image}", (image,), question, [word])
