"""Deployment logs, webhooks and their deliveries, counts of resources, metric windows of several widths"""

import math
import struct
from functools import cache

from alembic import op
import sqlalchemy as sa

revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None

COUNTED = {
    'datasets': 'SELECT client_id, count(*) FROM datasets GROUP BY client_id',
    'jobs': 'SELECT client_id, count(*) FROM jobs GROUP BY client_id',
    'models': 'SELECT client_id, count(*) FROM models GROUP BY client_id',
    'deployments': "SELECT client_id, count(*) FROM deployments WHERE status != 'deleted' GROUP BY client_id",
    'plain': "SELECT client_id, count(*) FROM endpoints WHERE kind = 'plain' AND status != 'deleted' GROUP BY client_id",
    'canary': "SELECT client_id, count(*) FROM endpoints WHERE kind = 'canary' AND status != 'deleted' GROUP BY client_id",
}


def upgrade():
    op.add_column('api_keys', sa.Column('last_used_at', sa.DateTime(timezone=True), nullable=True))
    op.add_column('datasets', sa.Column('duplicate_examples', sa.BigInteger(), nullable=True))
    op.add_column('datasets', sa.Column('error', sa.JSON(none_as_null=True), nullable=True))
    op.create_index('ix_datasets_status', 'datasets', ['status'])
    op.add_column('deployments', sa.Column('health', sa.Text(), nullable=False, server_default='unknown'))
    op.add_column('jobs', sa.Column('epochs_told', sa.BigInteger(), nullable=False, server_default='0'))
    op.add_column('job_metrics', sa.Column('evaluated', sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column('job_metrics', sa.Column('log_id', sa.BigInteger(), nullable=False, server_default='0'))
    op.execute(
        'UPDATE job_metrics SET evaluated = true WHERE NOT EXISTS (SELECT 1 FROM job_metrics AS earlier '
        'WHERE earlier.job_id = job_metrics.job_id AND earlier.step = job_metrics.step - 1 '
        'AND earlier.validation_loss = job_metrics.validation_loss)'
    )
    op.create_index('ix_events_client_id_position', 'events', ['client_id', 'position'])
    op.create_table('deployment_logs',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), nullable=False),
    sa.Column('deployment_id', sa.Text(), nullable=False),
    sa.Column('timestamp', sa.DateTime(timezone=True), nullable=False),
    sa.Column('level', sa.Text(), nullable=False),
    sa.Column('component', sa.Text(), nullable=False),
    sa.Column('request_id', sa.Text(), nullable=True),
    sa.Column('message', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_deployment_logs'))
    )
    op.create_index('ix_deployment_logs_deployment_id_timestamp_id', 'deployment_logs', ['deployment_id', 'timestamp', 'id'])
    op.create_table('webhooks',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('tags', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('url', sa.Text(), nullable=False),
    sa.Column('description', sa.Text(), nullable=False),
    sa.Column('events', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('active', sa.Boolean(), nullable=False),
    sa.Column('secret', sa.LargeBinary(), nullable=False),
    sa.Column('previous_secret', sa.LargeBinary(), nullable=True),
    sa.Column('previous_until', sa.DateTime(timezone=True), nullable=True),
    sa.Column('failing_since', sa.DateTime(timezone=True), nullable=True),
    sa.Column('disabled_reason', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_webhooks'))
    )
    op.create_index('ix_webhooks_client_id_created_at_id', 'webhooks', ['client_id', 'created_at', 'id'])
    op.create_table('deliveries',
    sa.Column('webhook_id', sa.Text(), nullable=False),
    sa.Column('event_id', sa.Text(), nullable=False),
    sa.Column('status', sa.Text(), nullable=False),
    sa.Column('attempts', sa.BigInteger(), nullable=False),
    sa.Column('created_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('updated_at', sa.DateTime(timezone=True), nullable=False),
    sa.Column('next_attempt_at', sa.DateTime(timezone=True), nullable=True),
    sa.Column('response_status', sa.Integer(), nullable=True),
    sa.Column('failure', sa.Text(), nullable=True),
    sa.PrimaryKeyConstraint('webhook_id', 'event_id', name=op.f('pk_deliveries'))
    )
    op.create_index('ix_deliveries_webhook_id_next_attempt_at', 'deliveries', ['webhook_id', 'next_attempt_at'])
    op.create_index('ix_deliveries_webhook_id_created_at_event_id', 'deliveries', ['webhook_id', 'created_at', 'event_id'])
    op.create_index('ix_jobs_client_id_status_created_at_id', 'jobs', ['client_id', 'status', 'created_at', 'id'])
    op.create_index('ix_deployments_client_id_status', 'deployments', ['client_id', 'status'])
    op.create_table('resource_counts',
    sa.Column('client_id', sa.Text(), nullable=False),
    sa.Column('resource', sa.Text(), nullable=False),
    sa.Column('number', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('client_id', 'resource', name=op.f('pk_resource_counts'))
    )
    for resource, query in COUNTED.items():
        op.execute(
            'INSERT INTO resource_counts (client_id, resource, number) '
            f"SELECT counted.client_id, '{resource}', counted.number "
            f'FROM ({query.replace("count(*)", "count(*) AS number")}) AS counted'
        )
    op.rename_table('metric_windows', 'metric_windows_of_one_second')
    op.create_table('metric_windows',
    sa.Column('deployment_id', sa.Text(), nullable=False),
    sa.Column('endpoint_id', sa.Text(), nullable=False),
    sa.Column('width', sa.BigInteger(), nullable=False),
    sa.Column('start', sa.BigInteger(), nullable=False),
    sa.Column('window', sa.LargeBinary(), nullable=False),
    sa.Column('minutes', sa.LargeBinary(), nullable=True),
    sa.PrimaryKeyConstraint('deployment_id', 'endpoint_id', 'width', 'start', name=op.f('pk_metric_windows_of_widths')),
    sqlite_with_rowid=False
    )
    op.create_index('ix_metric_windows_width_start', 'metric_windows', ['width', 'start'])
    _roll_up()
    op.drop_table('metric_windows_of_one_second')


# What follows is how windows were stored in this version, written out: nothing of it may change with the code.

DAY, HOUR, MINUTE, SECOND = 86400, 3600, 60, 1
KEPT = {SECOND: 2 * DAY, MINUTE: 90 * DAY, HOUR: 90 * DAY}
EDGES_MS = [2.0 ** power for power in range(18)]
QUANTILES = (0.5, 0.95, 0.99)
GROWTH = 2 * 0.01 / (1 - 0.01)
STEPS_PER_DOUBLING = 1 / math.log1p(GROWTH) * math.log(2)


@cache
def _milliseconds(index):
    """The latency that an index of the sketch stands for (DDSketch's logarithmic mapping, 1 % relative accuracy)."""
    return math.pow(2.0, index / STEPS_PER_DOUBLING) * (2.0 / (1 + (1 + GROWTH)))


def _facts(window):
    """Requests, errors, empty, input, output; sum of ms; three percentiles; 19 counts of a rising histogram."""
    sketch = sorted(window['latencies'].items())
    answered = window['n'] - window['errors']
    percentiles, histogram = [], []
    for quantile in QUANTILES:
        rank, passed, found = math.floor(quantile * (answered - 1)), 0, 0.0
        for index, count in sketch if answered > 0 else ():
            passed += count
            if passed >= rank + 1:
                found = _milliseconds(index)
                break
        percentiles.append(found)
    for edge in (*EDGES_MS, math.inf):
        histogram.append(sum(count for index, count in sketch if _milliseconds(index) <= edge))
    numbers = (window[name] for name in ('n', 'errors', 'empty', 'in', 'out'))
    return struct.pack('<5q4d19I', *numbers, window['ms'], *percentiles, *histogram)


def _bytes(window):
    return _facts(window) + b''.join(struct.pack('<hI', *pair) for pair in sorted(window['latencies'].items()))


def _add(windows, key, more):
    if key not in windows:
        windows[key] = {'n': 0, 'errors': 0, 'empty': 0, 'ms': 0.0, 'in': 0, 'out': 0, 'latencies': {}}
    window = windows[key]
    for name in ('n', 'errors', 'empty', 'ms', 'in', 'out'):
        window[name] += more[name]
    for index, count in more['latencies']:
        window['latencies'][index] = window['latencies'].get(index, 0) + count


def _roll_up():
    """Windows of one second, kept as JSON until now, become windows of every width, hour after hour."""
    connection = op.get_bind()
    old = sa.table(
        'metric_windows_of_one_second',
        sa.column('deployment_id'), sa.column('endpoint_id'), sa.column('start'), sa.column('window', sa.JSON),
    )
    new = sa.table(
        'metric_windows',
        *(sa.column(name) for name in ('deployment_id', 'endpoint_id', 'width', 'start', 'window', 'minutes')),
    )
    newest = connection.execute(sa.select(sa.func.max(old.c.start))).scalar()
    if newest is None:
        return
    oldest = {width: (newest - kept) // HOUR * HOUR for width, kept in KEPT.items()}
    hour = (old.c.start - old.c.start % HOUR).label('hour')
    hours = connection.execute(sa.select(old.c.deployment_id, hour).distinct()).all()
    for deployment_id, start in hours:
        seconds = sa.select(old.c.endpoint_id, old.c.start, old.c.window).where(
            old.c.deployment_id == deployment_id, old.c.start >= start, old.c.start < start + HOUR
        )
        windows = {}
        for row in connection.execute(seconds):
            if row.window['n']:
                for endpoint_id in {row.endpoint_id, ''}:  # every deployment has a series of its whole traffic
                    for width in KEPT:
                        _add(windows, (endpoint_id, width, row.start // width * width), row.window)
        rows = [
            {
                'deployment_id': deployment_id, 'endpoint_id': endpoint_id, 'width': width, 'start': at,
                'window': _bytes(window),
                'minutes': _minutes(windows, endpoint_id, at) if width == HOUR else None,
            }
            for (endpoint_id, width, at), window in windows.items() if at >= oldest[width]
        ]
        if rows:
            connection.execute(sa.insert(new), rows)


def _minutes(windows, endpoint_id, hour):
    """The numbers of an hour's sixty minutes, one record after the other."""
    keys = [(endpoint_id, MINUTE, hour + number * MINUTE) for number in range(HOUR // MINUTE)]
    empty = bytes(struct.calcsize('<5q4d19I'))
    return b''.join(_facts(windows[key]) if key in windows else empty for key in keys)
