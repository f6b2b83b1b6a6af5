"""The bench: ours and the peers side by side in one process, judged before they are timed, written as JSON, drawn from it."""
