//! The library's exported functions. All return an [`HsakmtStatus`](crate::status::HsakmtStatus) and have the
//! symbol version [`SYMBOL_VERSION`](crate::release::SYMBOL_VERSION).

use crate::release::Releases;

/// An exported function.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Name.
    pub name: &'static str,
    /// Number of arguments of the C prototype.
    pub arguments: u8,
    /// Releases that export it.
    pub releases: Releases,
}

const BOTH: Releases = Releases::ROCM_5_2_3.union(Releases::ROCM_6_2_4);
const ONLY_5: Releases = Releases::ROCM_5_2_3;
const ONLY_6: Releases = Releases::ROCM_6_2_4;

const fn function(name: &'static str, arguments: u8, releases: Releases) -> Function {
    Function { name, arguments, releases }
}

/// All of them, by name: 67 in ROCm 5.2.3, 88 in ROCm 6.2.4 (the libraries of Debian 12 and 13).
pub const FUNCTIONS: &[Function] = &[
    function("hsaKmtAcquireSystemProperties", 1, BOTH),
    function("hsaKmtAllocMemory", 4, BOTH),
    function("hsaKmtAllocMemoryAlign", 5, ONLY_6),
    function("hsaKmtAllocQueueGWS", 3, BOTH),
    function("hsaKmtAvailableMemory", 2, ONLY_6),
    function("hsaKmtCheckRuntimeDebugSupport", 0, ONLY_6),
    function("hsaKmtCloseKFD", 0, BOTH),
    function("hsaKmtCreateEvent", 4, BOTH),
    function("hsaKmtCreateQueue", 8, BOTH),
    function("hsaKmtDbgAddressWatch", 6, BOTH),
    function("hsaKmtDbgDisable", 0, ONLY_6),
    function("hsaKmtDbgEnable", 2, ONLY_6),
    function("hsaKmtDbgGetDeviceData", 3, ONLY_6),
    function("hsaKmtDbgGetQueueData", 4, ONLY_6),
    function("hsaKmtDbgRegister", 1, BOTH),
    function("hsaKmtDbgUnregister", 1, BOTH),
    function("hsaKmtDbgWavefrontControl", 5, BOTH),
    function("hsaKmtDebugTrapIoctl", 3, ONLY_6),
    function("hsaKmtDeregisterMemory", 1, BOTH),
    function("hsaKmtDestroyEvent", 1, BOTH),
    function("hsaKmtDestroyQueue", 1, BOTH),
    function("hsaKmtExportDMABufHandle", 4, ONLY_6),
    function("hsaKmtFreeMemory", 2, BOTH),
    function("hsaKmtGetAMDGPUDeviceHandle", 2, ONLY_6),
    function("hsaKmtGetClockCounters", 2, BOTH),
    function("hsaKmtGetKernelDebugTrapVersionInfo", 2, ONLY_5),
    function("hsaKmtGetNodeCacheProperties", 4, BOTH),
    function("hsaKmtGetNodeIoLinkProperties", 3, BOTH),
    function("hsaKmtGetNodeMemoryProperties", 3, BOTH),
    function("hsaKmtGetNodeProperties", 2, BOTH),
    function("hsaKmtGetQueueInfo", 2, BOTH),
    function("hsaKmtGetRuntimeCapabilities", 1, ONLY_6),
    function("hsaKmtGetTileConfig", 2, BOTH),
    function("hsaKmtGetVersion", 1, BOTH),
    function("hsaKmtGetXNACKMode", 1, BOTH),
    function("hsaKmtMapGraphicHandle", 6, BOTH),
    function("hsaKmtMapMemoryToGPU", 3, BOTH),
    function("hsaKmtMapMemoryToGPUNodes", 6, BOTH),
    function("hsaKmtOpenKFD", 0, BOTH),
    function("hsaKmtOpenSMI", 2, ONLY_6),
    function("hsaKmtPcSamplingCreate", 3, ONLY_6),
    function("hsaKmtPcSamplingDestroy", 2, ONLY_6),
    function("hsaKmtPcSamplingQueryCapabilities", 4, ONLY_6),
    function("hsaKmtPcSamplingStart", 2, ONLY_6),
    function("hsaKmtPcSamplingStop", 2, ONLY_6),
    function("hsaKmtPcSamplingSupport", 0, ONLY_6),
    function("hsaKmtPmcAcquireTraceAccess", 2, BOTH),
    function("hsaKmtPmcGetCounterProperties", 2, BOTH),
    function("hsaKmtPmcQueryTrace", 1, BOTH),
    function("hsaKmtPmcRegisterTrace", 4, BOTH),
    function("hsaKmtPmcReleaseTraceAccess", 2, BOTH),
    function("hsaKmtPmcStartTrace", 3, BOTH),
    function("hsaKmtPmcStopTrace", 1, BOTH),
    function("hsaKmtPmcUnregisterTrace", 2, BOTH),
    function("hsaKmtProcessVMRead", 6, BOTH),
    function("hsaKmtProcessVMWrite", 6, BOTH),
    function("hsaKmtQueryEventState", 1, BOTH),
    function("hsaKmtQueryPointerInfo", 2, BOTH),
    function("hsaKmtRegisterGraphicsHandleToNodes", 4, BOTH),
    function("hsaKmtRegisterMemory", 2, BOTH),
    function("hsaKmtRegisterMemoryToNodes", 4, BOTH),
    function("hsaKmtRegisterMemoryWithFlags", 3, BOTH),
    function("hsaKmtRegisterSharedHandle", 3, BOTH),
    function("hsaKmtRegisterSharedHandleToNodes", 5, BOTH),
    function("hsaKmtReleaseSystemProperties", 0, BOTH),
    function("hsaKmtReplaceAsanHeaderPage", 1, ONLY_6),
    function("hsaKmtResetEvent", 1, BOTH),
    function("hsaKmtReturnAsanHeaderPage", 1, ONLY_6),
    function("hsaKmtRuntimeDisable", 0, BOTH),
    function("hsaKmtRuntimeEnable", 2, BOTH),
    function("hsaKmtSPMAcquire", 1, BOTH),
    function("hsaKmtSPMRelease", 1, BOTH),
    function("hsaKmtSPMSetDestBuffer", 6, BOTH),
    function("hsaKmtSVMGetAttr", 4, BOTH),
    function("hsaKmtSVMSetAttr", 4, BOTH),
    function("hsaKmtSetEvent", 1, BOTH),
    function("hsaKmtSetMemoryPolicy", 5, BOTH),
    function("hsaKmtSetMemoryUserData", 2, BOTH),
    function("hsaKmtSetQueueCUMask", 3, BOTH),
    function("hsaKmtSetTrapHandler", 5, BOTH),
    function("hsaKmtSetXNACKMode", 1, BOTH),
    function("hsaKmtShareMemory", 3, BOTH),
    function("hsaKmtUnmapGraphicHandle", 3, BOTH),
    function("hsaKmtUnmapMemoryToGPU", 1, BOTH),
    function("hsaKmtUpdateQueue", 6, BOTH),
    function("hsaKmtWaitOnEvent", 2, BOTH),
    function("hsaKmtWaitOnEvent_Ext", 3, ONLY_6),
    function("hsaKmtWaitOnMultipleEvents", 4, BOTH),
    function("hsaKmtWaitOnMultipleEvents_Ext", 5, ONLY_6),
];

/// Finds a function by name.
pub fn by_name(name: &str) -> Option<&'static Function> {
    FUNCTIONS.iter().find(|function| function.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `nm -D` of the two libraries.
    #[test]
    fn counts() {
        let count = |release| FUNCTIONS.iter().filter(|f| f.releases.contains(release)).count();
        assert_eq!(count(Releases::ROCM_5_2_3), 67);
        assert_eq!(count(Releases::ROCM_6_2_4), 88);
        assert!(FUNCTIONS.windows(2).all(|pair| pair[0].name < pair[1].name));
    }
}
