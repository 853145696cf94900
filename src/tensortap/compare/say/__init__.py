"""Put the result into words and tables.

conclusion.py       the result as a whole: verdict, sentence, notes and table (table.py, columns.py)
result_sentence.py  chooses the sentence: divergence.py, agreement.py or open_verdicts.py
beside.py           further sentences about what differs beside the numbers; arguments.py, gaps.py, gradients.py,
                    loop.py, operators.py, parameters.py and precision.py have those about one matter each
notes.py            the notes beside a verdict; zoom_hint.py the command that finds the line
formatting.py       numbers and lists
"""
