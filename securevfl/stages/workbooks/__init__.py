"""Tables in Excel's workbooks."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(sources=dict.fromkeys((".xlsx", ".xlsm"), "workbooks:WORKBOOK"))
