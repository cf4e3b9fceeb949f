"""Tables in Excel's workbooks."""

from securevfl.core.stages import Stage

STAGE = Stage(sources=dict.fromkeys((".xlsx", ".xlsm"), "workbooks:WORKBOOK"))
