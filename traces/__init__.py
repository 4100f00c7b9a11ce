"""The work there is: measured op costs and sizes, key streams, workload models, importers and exporters."""
