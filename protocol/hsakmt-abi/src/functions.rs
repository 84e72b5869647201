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

const ONLY_5: Releases = Releases::ROCM_5_2_3;
const ONLY_2026: Releases = Releases::EXPORTS_2026;
const ONLY_ROCR: Releases = Releases::ROCR_7;
const ONLY_DRIVER: Releases = Releases::DRIVER_2026;
const SINCE_7: Releases = ONLY_2026.union(ONLY_ROCR);
const SINCE_6: Releases = SINCE_7.union(Releases::ROCM_6_2_4);
const ALL: Releases = SINCE_6.union(ONLY_5);

const fn function(name: &'static str, arguments: u8, releases: Releases) -> Function {
    Function { name, arguments, releases }
}

/// All of them, by name: 67 in ROCm 5.2.3, 88 in ROCm 6.2.4 (the libraries of Debian 12 and 13), 109 in the version script of
/// 2026, 93 that ROCr 7 looks up by name. Arguments of those since 2026 are as they were when they came; some have changed since.
pub const FUNCTIONS: &[Function] = &[
    function("hsaKmtAcquireSystemProperties", 1, ALL),
    function("hsaKmtAisReadWriteFile", 7, SINCE_7),
    function("hsaKmtAllocMemory", 4, ALL),
    function("hsaKmtAllocMemoryAlign", 5, SINCE_6),
    function("hsaKmtAllocQueueGWS", 3, ALL),
    function("hsaKmtAvailableMemory", 2, SINCE_6),
    function("hsaKmtCheckRuntimeDebugSupport", 0, SINCE_6),
    function("hsaKmtCloseKFD", 0, ALL),
    function("hsaKmtCreateEvent", 4, ALL),
    function("hsaKmtCreateQueue", 8, ALL),
    function("hsaKmtCreateQueueExt", 9, ONLY_ROCR),
    function("hsaKmtCreateQueueV2", 10, ONLY_DRIVER),
    function("hsaKmtDbgAddressWatch", 6, ALL),
    function("hsaKmtDbgDisable", 0, SINCE_6),
    function("hsaKmtDbgEnable", 2, SINCE_6),
    function("hsaKmtDbgGetDeviceData", 3, SINCE_6),
    function("hsaKmtDbgGetQueueData", 4, SINCE_6),
    function("hsaKmtDbgRegister", 1, ALL),
    function("hsaKmtDbgUnregister", 1, ALL),
    function("hsaKmtDbgWavefrontControl", 5, ALL),
    function("hsaKmtDebugTrapIoctl", 3, SINCE_6),
    function("hsaKmtDeregisterMemory", 1, ALL),
    function("hsaKmtDestroyEvent", 1, ALL),
    function("hsaKmtDestroyExternalSemaphore", 1, ONLY_2026),
    function("hsaKmtDestroyQueue", 1, ALL),
    function("hsaKmtExportDMABufHandle", 4, SINCE_6),
    function("hsaKmtFreeMemory", 2, ALL),
    function("hsaKmtGetAMDGPUDeviceHandle", 2, SINCE_6),
    function("hsaKmtGetAmdGPUDeviceFd", 2, ONLY_2026),
    function("hsaKmtGetClockCounters", 2, ALL),
    function("hsaKmtGetCoreDeviceInfo", 2, ONLY_2026),
    function("hsaKmtGetCoreRuntimeInfo", 1, ONLY_2026),
    function("hsaKmtGetKernelDebugTrapVersionInfo", 2, ONLY_5),
    function("hsaKmtGetKernelQueueId", 2, ONLY_2026),
    function("hsaKmtGetMemoryHandle", 4, ONLY_2026),
    function("hsaKmtGetNodeCacheProperties", 4, ALL),
    function("hsaKmtGetNodeIoLinkProperties", 3, ALL),
    function("hsaKmtGetNodeMemoryProperties", 3, ALL),
    function("hsaKmtGetNodeProperties", 2, ALL),
    function("hsaKmtGetNodeWallclockFrequency", 2, ONLY_2026),
    function("hsaKmtGetQueueInfo", 2, ALL),
    function("hsaKmtGetRuntimeCapabilities", 1, SINCE_6),
    function("hsaKmtGetTileConfig", 2, ALL),
    function("hsaKmtGetVersion", 1, ALL),
    function("hsaKmtGetXNACKMode", 1, ALL),
    function("hsaKmtHandleExport", 3, ONLY_2026),
    function("hsaKmtHandleImport", 3, ONLY_2026),
    function("hsaKmtImportExternalSemaphore", 4, ONLY_2026),
    function("hsaKmtMapGraphicHandle", 6, ALL),
    function("hsaKmtMapMemoryToGPU", 3, ALL),
    function("hsaKmtMapMemoryToGPUNodes", 6, ALL),
    function("hsaKmtMemHandleFree", 1, ONLY_2026),
    function("hsaKmtMemHandleFreePreserveMetadata", 1, ONLY_2026),
    function("hsaKmtMemoryCpuMap", 2, ONLY_2026),
    function("hsaKmtMemoryGetCpuAddr", 4, ONLY_2026),
    function("hsaKmtMemoryVaMap", 5, ONLY_2026),
    function("hsaKmtMemoryVaUnmap", 4, ONLY_2026),
    function("hsaKmtModelEnabled", 1, ONLY_ROCR),
    function("hsaKmtOpenKFD", 0, ALL),
    function("hsaKmtOpenSMI", 2, SINCE_6),
    function("hsaKmtPcSamplingCreate", 3, SINCE_6),
    function("hsaKmtPcSamplingDestroy", 2, SINCE_6),
    function("hsaKmtPcSamplingQueryCapabilities", 4, SINCE_6),
    function("hsaKmtPcSamplingStart", 2, SINCE_6),
    function("hsaKmtPcSamplingStop", 2, SINCE_6),
    function("hsaKmtPcSamplingSupport", 0, SINCE_6),
    function("hsaKmtPmcAcquireTraceAccess", 2, ALL),
    function("hsaKmtPmcGetCounterProperties", 2, ALL),
    function("hsaKmtPmcQueryTrace", 1, ALL),
    function("hsaKmtPmcRegisterTrace", 4, ALL),
    function("hsaKmtPmcReleaseTraceAccess", 2, ALL),
    function("hsaKmtPmcStartTrace", 3, ALL),
    function("hsaKmtPmcStopTrace", 1, ALL),
    function("hsaKmtPmcUnregisterTrace", 2, ALL),
    function("hsaKmtProcessVMRead", 6, ALL),
    function("hsaKmtProcessVMWrite", 6, ALL),
    function("hsaKmtQueryEventState", 1, ALL),
    function("hsaKmtQueryPointerInfo", 2, ALL),
    function("hsaKmtQueueRingDoorbell", 1, ONLY_ROCR),
    function("hsaKmtQueueSignalExternalSemaphore", 3, ONLY_2026),
    function("hsaKmtQueueWaitExternalSemaphore", 3, ONLY_2026),
    function("hsaKmtRegisterGraphicsHandleToNodes", 4, ALL),
    function("hsaKmtRegisterGraphicsHandleToNodesExt", 5, ONLY_ROCR),
    function("hsaKmtRegisterMemory", 2, ALL),
    function("hsaKmtRegisterMemoryToNodes", 4, ALL),
    function("hsaKmtRegisterMemoryWithFlags", 3, ALL),
    function("hsaKmtRegisterSharedHandle", 3, ALL),
    function("hsaKmtRegisterSharedHandleToNodes", 5, ALL),
    function("hsaKmtReleaseSystemProperties", 0, ALL),
    function("hsaKmtReplaceAsanHeaderPage", 1, SINCE_6),
    function("hsaKmtResetEvent", 1, ALL),
    function("hsaKmtReturnAsanHeaderPage", 1, SINCE_6),
    function("hsaKmtRuntimeDisable", 0, ALL),
    function("hsaKmtRuntimeEnable", 2, ALL),
    function("hsaKmtSPMAcquire", 1, ALL),
    function("hsaKmtSPMRelease", 1, ALL),
    function("hsaKmtSPMSetDestBuffer", 6, ALL),
    function("hsaKmtSVMGetAttr", 4, ALL),
    function("hsaKmtSVMSetAttr", 4, ALL),
    function("hsaKmtSetEvent", 1, ALL),
    function("hsaKmtSetMemoryPolicy", 5, ALL),
    function("hsaKmtSetMemoryUserData", 2, ALL),
    function("hsaKmtSetPersistingCacheSize", 2, ONLY_2026),
    function("hsaKmtSetQueueCUMask", 3, ALL),
    function("hsaKmtSetSigbusDelay", 2, ONLY_2026),
    function("hsaKmtSetTrapHandler", 5, ALL),
    function("hsaKmtSetXNACKMode", 1, ALL),
    function("hsaKmtShareMemory", 3, ALL),
    function("hsaKmtUnmapGraphicHandle", 3, ALL),
    function("hsaKmtUnmapMemoryToGPU", 1, ALL),
    function("hsaKmtUpdateQueue", 6, ALL),
    function("hsaKmtWaitOnEvent", 2, ALL),
    function("hsaKmtWaitOnEvent_Ext", 3, SINCE_6),
    function("hsaKmtWaitOnMultipleEvents", 4, ALL),
    function("hsaKmtWaitOnMultipleEvents_Ext", 5, SINCE_6),
];

/// Finds a function by name.
pub fn by_name(name: &str) -> Option<&'static Function> {
    FUNCTIONS.iter().find(|function| function.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `nm -D` of the two libraries, and the names in the two files of 2026.
    #[test]
    fn counts() {
        let count = |release| FUNCTIONS.iter().filter(|f| f.releases.contains(release)).count();
        assert_eq!(count(Releases::ROCM_5_2_3), 67);
        assert_eq!(count(Releases::ROCM_6_2_4), 88);
        assert_eq!(count(Releases::EXPORTS_2026), 109);
        assert_eq!(count(Releases::ROCR_7), 93);
        assert_eq!(count(Releases::DRIVER_2026), 1);
        assert!(FUNCTIONS.windows(2).all(|pair| pair[0].name < pair[1].name));
    }
}
