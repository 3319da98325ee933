"""Published tables, and how we compute the same cells."""

from gossamer.studies.reproductions.ad_psgd import SLOW_WORKER, SPEED_UP
from gossamer.studies.reproductions.ad_psgd_cifar10 import TABLE as AD_PSGD_CIFAR10
from gossamer.studies.reproductions.ad_psgd_cifar10 import VGG as AD_PSGD_VGG
from gossamer.studies.reproductions.ad_psgd_network import SHARED_NETWORK
from gossamer.studies.reproductions.async_diloco_clock import TABLE as ASYNC_DILOCO_CLOCK
from gossamer.studies.reproductions.averaging_period import TABLE as AVERAGING_PERIOD
from gossamer.studies.reproductions.compressed.bits_cliff import TABLE as BITS_CLIFF
from gossamer.studies.reproductions.compressed.cifar10 import DGC, POWERSGD
from gossamer.studies.reproductions.dc_asgd import TABLE as DC_ASGD
from gossamer.studies.reproductions.delayed_gradients import ADAM, ADAM_FAR, SGD
from gossamer.studies.reproductions.goodput import TABLE as GOODPUT
from gossamer.studies.reproductions.gossip_scaling import DIGITS as GOSSIP_SCALING_DIGITS
from gossamer.studies.reproductions.gossip_scaling import TABLE as GOSSIP_SCALING
from gossamer.studies.reproductions.parallel.megatron_seqsel import TABLE as MEGATRON_SEQSEL
from gossamer.studies.reproductions.parallel.one_weird_trick import TABLE as ONE_WEIRD_TRICK
from gossamer.studies.reproductions.parallel.pipedream import TABLE as PIPEDREAM
from gossamer.studies.reproductions.parallel.pipelines import TABLE as PIPELINES
from gossamer.studies.reproductions.repeated.backup_accuracy import TABLE as BACKUP_ACCURACY
from gossamer.studies.reproductions.repeated.easgd_tau import TABLE as EASGD_TAU
from gossamer.studies.reproductions.repeated.hogwild_sparse import TABLE as HOGWILD_SPARSE
from gossamer.studies.reproductions.repeated.linear_speed_up import TABLE as LINEAR_SPEED_UP
from gossamer.studies.reproductions.repeated.staleness_remedies import TABLE as STALENESS_REMEDIES
from gossamer.studies.reproductions.rudra import TABLE as RUDRA
from gossamer.studies.reproductions.servers import BACKUP_WORKERS, SOFTSYNC_STALENESS
from gossamer.studies.reproductions.streaming_diloco import TABLE as STREAMING_DILOCO
from gossamer.studies.reproductions.table import PublishedCell, PublishedTable

TABLES: dict[str, PublishedTable] = {
    table.name: table
    for table in (
        SLOW_WORKER,
        SPEED_UP,
        SHARED_NETWORK,
        SOFTSYNC_STALENESS,
        BACKUP_WORKERS,
        RUDRA,
        PIPELINES,
        ONE_WEIRD_TRICK,
        PIPEDREAM,
        MEGATRON_SEQSEL,
        SGD,
        ADAM,
        ADAM_FAR,
        DC_ASGD,
        AD_PSGD_CIFAR10,
        AD_PSGD_VGG,
        GOSSIP_SCALING,
        GOSSIP_SCALING_DIGITS,
        STREAMING_DILOCO,
        ASYNC_DILOCO_CLOCK,
        GOODPUT,
        AVERAGING_PERIOD,
        BITS_CLIFF,
        POWERSGD,
        DGC,
        LINEAR_SPEED_UP,
        STALENESS_REMEDIES,
        BACKUP_ACCURACY,
        HOGWILD_SPARSE,
        EASGD_TAU,
    )
}

__all__ = ["TABLES", "PublishedCell", "PublishedTable"]
