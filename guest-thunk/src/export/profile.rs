//! Performance counters, sampling, system management events.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

mod counters;

use std::os::fd::IntoRawFd;

use hsakmt_abi::counters::{HsaCounter, HsaPcSamplingInfo, HsaPmcTraceRoot};

use super::exports;
use super::pointer::{Address, In, Out};
use crate::thunk::open;
use crate::thunk::refusal::Refusal;

exports! {
    "profile";
    /// The performance counters of a node.
    done("what they count are perf events of the host, which guests do not get")
    fn hsaKmtPmcGetCounterProperties(node_id: u32, counter_properties: Out<Address>) {
        let thunk = open::current()?;
        let place = counter_properties.required("CounterProperties")?;
        let found = counters::properties(thunk.snapshot()?.node(node_id)?.gfx)?;
        place.write(found.cast());
        Ok(())
    }

    /// Makes a trace of performance counters.
    not_implemented("they are the host's perf events")
    fn hsaKmtPmcRegisterTrace(
        node_id: u32,
        number_of_counters: u32,
        counters: In<HsaCounter>,
        trace_root: Out<HsaPmcTraceRoot>,
    );

    /// Ends a trace.
    not_implemented("they are the host's perf events")
    fn hsaKmtPmcUnregisterTrace(node_id: u32, trace_id: u64);

    /// Takes the counters of a trace.
    not_implemented("they are the host's perf events")
    fn hsaKmtPmcAcquireTraceAccess(node_id: u32, trace_id: u64);

    /// Gives the counters of a trace back.
    not_implemented("they are the host's perf events")
    fn hsaKmtPmcReleaseTraceAccess(node_id: u32, trace_id: u64);

    /// Starts a trace.
    not_implemented("they are the host's perf events")
    fn hsaKmtPmcStartTrace(trace_id: u64, trace_buffer: Address, trace_buffer_size_bytes: u64);

    /// Reads the counters of a trace.
    not_implemented("they are the host's perf events")
    fn hsaKmtPmcQueryTrace(trace_id: u64);

    /// Stops a trace.
    not_implemented("they are the host's perf events")
    fn hsaKmtPmcStopTrace(trace_id: u64);

    /// Takes the streaming performance monitor.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtSPMAcquire(preferred_node: u32);

    /// Gives the streaming performance monitor back.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtSPMRelease(preferred_node: u32);

    /// Says where the streaming performance monitor writes to.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtSPMSetDestBuffer(
        preferred_node: u32,
        size_in_bytes: u32,
        timeout: Out<u32>,
        size_copied: Out<u32>,
        dest_memory_address: Address,
        is_spm_data_loss: Out<bool>,
    );

    /// Whether the kernel can sample program counters.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtPcSamplingSupport();

    /// How program counters can be sampled.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtPcSamplingQueryCapabilities(
        node_id: u32,
        sample_info: Address,
        sample_info_sz: u32,
        sz_needed: Out<u32>,
    );

    /// Makes a sampling session.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtPcSamplingCreate(node_id: u32, sample_info: Out<HsaPcSamplingInfo>, trace_id: Out<u32>);

    /// Ends a sampling session.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtPcSamplingDestroy(node_id: u32, trace_id: u32);

    /// Starts sampling.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtPcSamplingStart(node_id: u32, trace_id: u32);

    /// Stops sampling.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtPcSamplingStop(node_id: u32, trace_id: u32);

    /// A descriptor that system management events are read from.
    done("the kernel's limits of a descriptor differ a little, see docs/limits.md")
    fn hsaKmtOpenSMI(node_id: u32, fd: Out<i32>) {
        let thunk = open::current()?;
        let fd = fd.required("fd")?;
        let snapshot = thunk.snapshot()?;
        // KFD knows no CPU's events.
        let gpu = snapshot.gpu_of(node_id)?.map(|gpu| gpu.gpu_id);
        let gpu = gpu.ok_or_else(|| Refusal::error(format!("NodeId is {node_id}, which is no GPU")))?;
        fd.write(thunk.smi.open(&thunk, gpu)?.into_raw_fd());
        Ok(())
    }
}
