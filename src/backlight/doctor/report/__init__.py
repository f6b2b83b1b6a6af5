"""Reports: the data of one diagnosis (`model`) and the three ways to read it (terminal, HTML, JSON)."""

from backlight.doctor.report.model import SCHEMA, STAGE_ORDER, Finding, Picture, Probe, Report, StageRow, Where

__all__ = ["SCHEMA", "STAGE_ORDER", "Finding", "Picture", "Probe", "Report", "StageRow", "Where"]
